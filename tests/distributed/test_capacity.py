"""Models that let an expert take no more than its share, in calls of their own: one device's drops on any ranks, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from tests.distributed.moe import EXPERTS, WIDTH, Experts, Tower
from tests.distributed.test_experts import FSDP, SEQUENCE, adamw, batch, plan


class Block(nn.Module):
    """Drops what is over `factor` times an even share of the whole batch: the latest choices, or those of the least weight."""

    def __init__(self, policy: str, factor: float) -> None:
        super().__init__()
        self.policy, self.factor = policy, factor
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        most = int(self.factor * chosen.numel() / EXPERTS + 0.999)
        kept = self.first(chosen, most) if self.policy == "position" else self.best(tokens, scores, chosen, most)
        return x + self.experts(tokens, chosen, scores * kept).view_as(x)

    def first(self, chosen: Tensor, most: int) -> Tensor:
        mine = F.one_hot(chosen.flatten(), EXPERTS)
        return (mine.cumsum(0) * mine).sum(-1).view_as(chosen) <= most

    def best(self, tokens: Tensor, scores: Tensor, chosen: Tensor, most: int) -> Tensor:
        table = torch.zeros(tokens.shape[0], EXPERTS, dtype=tokens.dtype, device=tokens.device).scatter(1, chosen, scores)
        best = table.topk(min(most, tokens.shape[0]), 0).indices
        return torch.zeros_like(table).scatter(0, best, 1.0).gather(1, chosen)


def made(policy: str, factor: float = 1.0) -> nn.Module:
    return Tower(functools.partial(Block, policy, factor))


PLANS = {
    "ep 2 + fsdp": plan({"dp_shard": 2}, experts={"ep": 2}, **FSDP),
    "ep 2 of tp": plan({"tp": 2}, experts={"ep": 2}),
    "ep 2 x tp 2 + sp": plan({"dp_shard": 2, "tp": 2}, SEQUENCE, experts={"ep": 2}),
    "ep 4 of dp_shard 2 and cp 2": plan({"dp_shard": 2, "cp": 2}, experts={"ep": 4}),
}
REFUSED = {
    ("position", "ep 4 of dp_shard 2 and cp 2"): "experts-tokens",
    ("score", "ep 4 of dp_shard 2 and cp 2"): "experts-tokens",
}
"""Where what was chosen is whole on all ranks of cp, which ep borrows: each would send the same tokens."""


@pytest.mark.parametrize("policy", ["position", "score"])
@pytest.mark.parametrize("case", PLANS)
def test_what_is_dropped_is_what_one_device_drops(pool, case, policy):
    given = PLANS[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    code = REFUSED.get((policy, case))
    if code is not None:
        with pytest.raises(mp.PlanError) as caught:
            mp.lower(made(policy), given, n)
        assert caught.value.code == code
        return
    receipt = mp.verify(functools.partial(made, policy), given, nproc=n, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)


def test_something_is_dropped():
    losses: dict[Any, float] = {}
    for policy in ("position", "score"):
        for factor in (1.0, 8.0):
            losses[policy, factor] = made(policy, factor).double()(**batch()).item()
    assert losses["position", 8.0] == pytest.approx(losses["score", 8.0]) and len(set(losses.values())) > 2
