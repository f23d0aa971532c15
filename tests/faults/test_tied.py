"""Tied weights: one logical weight, one layout, and a gradient that is the sum of all its uses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, ids, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Tied(nn.Module):
    def __init__(self, rows: int = 8, loss: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(tokens)))
        if self.loss:
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits.square().sum()


class SharedLayer(nn.Module):
    """One block called twice, as in models that share their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(x)))
        return nn.functional.cross_entropy(x.transpose(1, 2), labels.clamp(0, 5))


INPUTS = {"tokens": ids(2, 3), "labels": ids(2, 3)}
BOTH = (mp.Rule("embed", use="embedding"), mp.Rule("head", use="vocab_head"))


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("rows", [8, 7])
def test_an_embedding_tied_to_the_head_gets_both_gradients(rows, loss):
    # torchtitan#2252, fairseq2#1380: vocabulary 7 is 4 rows on one rank and 3 on the other.
    exact(partial(Tied, rows, loss), plan_of(INPUTS, *BOTH), steps=3)


@pytest.mark.parametrize("rule", BOTH)
def test_a_rule_for_one_name_of_a_tied_weight_places_both(rule):
    low = mp.lower(Tied(), plan_of(INPUTS, rule), 2)
    assert {p["name"]: p["layout"] for p in low.placements} == {"embed.weight": {"tp": "S(0)"}}
    exact(Tied, plan_of(INPUTS, rule))


def test_a_tied_weight_in_the_root_unit_of_fsdp_and_split_by_vocabulary():
    inputs = {"tokens": ids(2, 3, dp=mp.S(0)), "labels": ids(2, 3, dp=mp.S(0))}
    mesh = {"dp_shard": 2, "tp": 2}
    exact(partial(Tied, 7, True), plan_of(inputs, *BOTH, mesh=mesh, fsdp=mp.Fsdp(units=[""])), 4)


def test_a_tied_weight_in_two_fsdp_units_is_refused():
    inputs = {"tokens": ids(2, 3, dp=mp.S(0)), "labels": ids(2, 3, dp=mp.S(0))}
    plan = plan_of(inputs, mesh={"dp_shard": 2}, fsdp=mp.Fsdp(units=["embed", "head"]))
    with pytest.raises(mp.PlanError, match="tied") as caught:
        mp.lower(Tied(), plan, 2).to_json()
    assert caught.value.code == "tied-across-units"


def test_two_layouts_of_one_tied_weight_are_refused():
    rules = (mp.Rule("embed", params={"weight": {"tp": mp.S(1)}}), mp.Rule("head", params={"weight": {"tp": mp.S(0)}}))
    error = refused(Tied, plan_of(INPUTS, *rules), "tied-layouts")
    assert "'embed.weight' and 'head.weight'" in error.message and error.where.line


def test_a_block_called_twice():
    rules = (mp.Rule("embed", use="embedding"), mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))
    exact(SharedLayer, plan_of(INPUTS, *rules))
