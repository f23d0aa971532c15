"""Derived plans over cp: the sequence is split, its attention rings, and everything is one device's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import meshplan as mp
from meshplan.verify.aligned import align
from tests.distributed.test_context import hugging_face, small_llama

S = mp.S


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2}], ids=["cp", "dp x cp x tp"])
def test_a_ring_is_derived_beside_other_axes(mesh):
    model = small_llama().double()
    plan = mp.auto_plan(model, mesh=mesh, inputs={"tokens": ids(2, 24), "labels": ids(2, 24)})
    assert plan.inputs["tokens"].place["cp"] == S(1)
    assert plan.context.to_dict() == {"attention": ["layers.*.attention"]}
    assert align(model, plan, math.prod(mesh.values())).distance < 1e-12


def test_odd_halves_stay_in_one_run():
    plan = mp.auto_plan(small_llama(), mesh={"cp": 3}, inputs={"tokens": ids(2, 9), "labels": ids(2, 9)})
    assert plan.context.balance == "contiguous"


def test_a_method_that_is_asked_for_is_kept():
    model = hugging_face("llama")
    given = {"attention": ["model.layers.*.self_attn"], "method": "ulysses"}
    plan = mp.auto_plan(model, mesh={"cp": 2}, inputs={"input_ids": ids(2, 8), "labels": ids(2, 8)}, context=given)
    assert {c.op for c in mp.lower(model, plan, 2).collectives if "self_attn" in c.module} == {"all_to_all"}


class Pooled(nn.Module):
    """Attention over the sequence, and over a summary of it whose length is the same by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(61, 8), Attend(), Attend()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens))
        return self.second(x.cumsum(1).sort(1).values).pow(2).mean()


class Attend(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1)


def test_attention_over_something_else_is_left_out():
    model = Pooled().double()
    plan = mp.auto_plan(model, mesh={"cp": 2}, inputs={"tokens": ids(2, 8)})
    assert plan.context.attention == ("first",)
    assert align(model, plan, 2).distance < 1e-12


def test_a_length_that_does_not_divide_is_left_whole():
    plan = mp.auto_plan(small_llama(), mesh={"cp": 2}, inputs={"tokens": ids(2, 7), "labels": ids(2, 7)})
    assert plan.context is None and "cp" not in plan.inputs["tokens"].place
