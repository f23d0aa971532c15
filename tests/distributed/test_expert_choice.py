"""Experts that choose tokens, in calls of the model's own: each takes its best ones of the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from tests.distributed.moe import EXPERTS, WIDTH, Tower
from tests.distributed.test_experts import FSDP, SEQUENCE, adamw, batch

S = mp.S


class Chooses(nn.Module):
    """Expert choice (2202.09368): expert e takes its `most` tokens of the highest score, and a token what it gets."""

    def __init__(self, most: int = 5, inner: int = 10) -> None:
        super().__init__()
        self.most = most
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, inner) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, inner, WIDTH) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, taken = self.router(tokens).softmax(-1).t().topk(self.most, -1)
        y = torch.bmm(F.gelu(torch.bmm(tokens[taken], self.up)), self.down) * scores[..., None]
        return x + torch.zeros_like(tokens).index_add(0, taken.flatten(), y.flatten(0, 1)).view_as(x)


def made() -> nn.Module:
    return Tower(Chooses)


SPLIT = (mp.Rule("layers.*", params={"up": {"tp": S(0)}, "down": {"tp": S(0)}}),)


def plan(mesh: dict[str, int], rules: tuple[mp.Rule, ...] = (), **sections: Any) -> mp.Plan:
    place: dict[str, Any] = {"dp": S(0)} if "dp_shard" in mesh else {}
    place |= {"cp": S(1)} if "cp" in mesh else {}
    inputs = {name: mp.Input(shape=(4, 6), dtype=torch.int64, place=place) for name in ("tokens", "labels")}
    return mp.Plan(mesh=mesh, inputs=inputs, rules=rules, **sections)


PLANS = {
    "experts split over tp": plan({"tp": 2}, SPLIT),
    "dp": plan({"dp_shard": 2}, **FSDP),
    "dp x experts split over tp": plan({"dp_shard": 2, "tp": 2}, SPLIT, **FSDP),
    "dp x tp + sp": plan({"dp_shard": 2, "tp": 2}, SPLIT + SEQUENCE),
    "cp": plan({"cp": 2}),
}


@pytest.mark.parametrize("case", PLANS)
def test_each_expert_takes_its_best_tokens_of_the_whole_batch(pool, case):
    given = PLANS[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    receipt = mp.verify(made, given, nproc=n, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)
