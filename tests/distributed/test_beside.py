"""Shared experts that compute while tokens are under way: exact, in that order, and left in place where they cannot move."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.ops.experts.legs import Leg
from tests.distributed.moe import EXPERTS, WIDTH, Experts, Tower
from tests.distributed.test_experts import FSDP, SEQUENCE, adamw, batch, plan

S = mp.S
LOG: list[str] = []


class Told(torch.autograd.Function):
    """Nothing, and says when a gradient comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        LOG.append("shared")
        return grads[0]


class Shared(nn.Module):
    """An MLP with dropout that says when it runs."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH), p

    def forward(self, x: Tensor) -> Tensor:
        LOG.append("shared")
        return self.down(F.dropout(F.gelu(Told.apply(self.up(x))), self.p, self.training))


class Block(nn.Module):
    """`given` says what the shared experts get: the block's own input, the tokens, or something made in between."""

    def __init__(self, given: str, p: float) -> None:
        super().__init__()
        self.given, self.late = given, False
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.shared = Experts(EXPERTS, WIDTH, 10), Shared(p)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        before = self.shared(x) if self.given == "before" else 0.0
        scores, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = self.experts(tokens, chosen, scores).view_as(x)
        if self.given == "before":
            return x + out + before
        if self.given == "tokens":
            return x + out + self.shared(tokens).view_as(x)
        if self.given == "result":
            return x + self.shared(out)
        return x + out + self.shared(x if not self.late else x * 1.0)


def made(given: str = "input", p: float = 0.25) -> nn.Module:
    return Tower(functools.partial(Block, given, p))


PLANS = {
    "ep 2 + fsdp": plan({"dp_shard": 2}, experts={"ep": 2}, **FSDP),
    "ep 2 + fsdp, recomputed": plan(
        {"dp_shard": 2}, experts={"ep": 2}, **FSDP, recompute={"units": ["layers.*"], "policy": "full"}
    ),
    "ep 2 of tp by allgather": plan({"tp": 2}, experts={"ep": 2, "dispatch": "allgather"}),
    "ep 2 x tp 2 + sp": plan({"dp_shard": 2, "tp": 2}, SEQUENCE, experts={"ep": 2}),
    "ep 4 by two levels": plan({"dp_shard": 4}, experts={"ep": 4, "dispatch": "twolevel", "inner": 2}),
}


@pytest.mark.parametrize("given", ["input", "before"])
@pytest.mark.parametrize("dispatch", ["auto", "alltoall", "allgather"])
def test_a_recompute_begins_where_it_was_listed_to_begin(pool, dispatch, given):
    """Backward sends what it can before it reads anything that was saved; only then the forward runs again."""
    recomputed = plan(
        {"dp_shard": 2}, experts={"ep": 2, "dispatch": dispatch}, recompute={"units": ["layers.*"], "policy": "full"}
    )
    receipt = mp.verify(functools.partial(made, given), recomputed, nproc=2, inputs=batch, steps=1, optimizer=adamw)
    assert receipt.passed, str(receipt)


@pytest.mark.parametrize("given", ["input", "tokens"])
@pytest.mark.parametrize("case", PLANS)
def test_dropout_and_gradients_are_those_of_one_device(pool, case, given):
    n = functools.reduce(int.__mul__, PLANS[case].mesh.values())
    receipt = mp.verify(
        functools.partial(made, given), PLANS[case], nproc=n, inputs=batch, steps=2, optimizer=adamw
    )
    assert receipt.passed, str(receipt)


def _order(given: str, overlap: bool = True, hooked: bool = False) -> list[list[str]]:
    """What happens in the first and in the second forward of a block, and in a backward."""
    model = mp.parallelize(made(given), plan({"dp_shard": 2}, experts={"ep": 2, "dispatch": "alltoall", "overlap": overlap}))
    if hooked:
        model.layers[0].shared.register_forward_hook(lambda *_: LOG.append("hook"))
    local, found = mp.shard_batch(model, batch()), []
    watched = {name: getattr(Leg, name) for name in ("start", "arrive", "start_back", "bring_back")}
    for name, own in watched.items():
        setattr(Leg, name, lambda *a, name=name, own=own: (LOG.append(name), own(*a))[1])
    try:
        for _ in range(2):
            LOG.clear()
            loss = model(**local)
            found.append(LOG[: len(LOG) // 2])
        LOG.clear()
        loss.backward()
        found.append(LOG[len(LOG) // 2 :])
    finally:
        for name, own in watched.items():
            setattr(Leg, name, own)
    return found


@pytest.mark.parametrize("given", ["input", "tokens"])
def test_they_run_between_the_start_of_the_exchange_and_its_end_in_every_run_and_in_backward(pool, given):
    early = ["start", "shared", "arrive", "start", "arrive"]
    back = ["start_back", "bring_back", "start_back", "shared", "bring_back"]
    assert pool.run(_order, given, world=2) == [[early, early, back]] * 2


LATE = ["start", "arrive", "start", "arrive", "shared"]


def test_what_needs_the_result_or_is_watched_or_was_forbidden_runs_where_it_is_called(pool):
    for case in ({"given": "result"}, {"given": "input", "overlap": False}):
        assert [found[0] for found in pool.run(_order, world=2, **case)] == [LATE] * 2
    assert [found[0] for found in pool.run(_order, "before", world=2)] == [["shared", *LATE[:-1]]] * 2
    assert [found[0] for found in pool.run(_order, "input", hooked=True, world=2)] == [LATE] * 2


def test_shared_experts_that_send_something_stay_where_they_are():
    rules = (
        mp.Rule("layers.*.shared.up", use="colwise"),
        mp.Rule("layers.*.shared.down", use="rowwise"),
    )
    split = plan({"dp_shard": 2, "tp": 2}, rules, experts={"ep": 2})
    assert mp.lower(made(p=0.0), split, 4).core.program.beside == ()
    whole = plan({"dp_shard": 2, "tp": 2}, experts={"ep": 2})
    assert [b.module for b in mp.lower(made(p=0.0), whole, 4).core.program.beside] == ["layers.0.shared", "layers.1.shared"]


def _changed() -> str:
    model = mp.parallelize(made(), plan({"dp_shard": 2}, experts={"ep": 2}))
    local = mp.shard_batch(model, batch())
    for _ in range(2):
        model(**local).backward()
    model.layers[1].late = True
    try:
        model(**local)
    except mp.PlanError as error:
        return f"{error.code}: {error.message}"
    return "went through"


def test_a_block_that_hands_over_another_tensor_is_refused(pool):
    for said in pool.run(_changed, world=2):
        assert said.startswith("other-branch")
