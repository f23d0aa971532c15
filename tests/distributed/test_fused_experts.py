"""A plan's `dispatch: fused` on gloo ranks that share memory, its kernels interpreted: exact, listed as it runs, or refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import meshplan as mp
from meshplan.verify.pool import RankPool
from tests.distributed.test_experts import adamw, batch, made, plan

FSDP: dict[str, Any] = {"fsdp": {"units": ["layers.*"]}}
PLANS = {
    "ep 2": plan({"dp_shard": 2}, experts={"ep": 2, "dispatch": "fused"}, **FSDP),
    "ep 2 of tp, tokens whole": plan({"tp": 2}, experts={"ep": 2, "dispatch": "fused"}),
    "ep 2 of dp_shard 4, recomputed": plan(
        {"dp_shard": 4}, experts={"ep": 2, "dispatch": "fused"}, **FSDP, recompute={"units": ["layers.*"], "policy": "full"}
    ),
}
ROUTINGS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "all tokens to the last expert": ({"k": 1, "skew": 50.0}, (2, 3)),
    "one token, on one of two ranks": ({"k": 2}, (1, 1)),
}


@pytest.fixture(scope="module")
def interpreting() -> Iterator[RankPool]:
    """Ranks that began with Triton's interpreter; `verify` takes the pool that was made last."""
    with RankPool(4, timeout=300.0) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            assert all(pool.run(_interprets, world=4))
        yield pool


def _interprets() -> bool:
    import triton

    return triton.knobs.runtime.interpret  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", PLANS)
def test_two_steps_are_those_of_one_device_and_what_is_sent_is_listed(interpreting, case):
    given = PLANS[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    receipt = mp.verify(functools.partial(made, layers=1), given, nproc=n, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)
    low = mp.lower(made(layers=1), given, n)
    ops = [c.op for c in low.collectives if c.module.endswith("experts") and c.phase == "forward" and c.routed]
    assert ops == ["peer_push"] * 4 + ["peer_pull"]


@pytest.mark.parametrize("case", ROUTINGS)
def test_any_routing_is_exact(interpreting, case):
    options, shape = ROUTINGS[case]
    given = plan({"tp": 2}, experts={"ep": 2, "dispatch": "fused"})
    receipt = mp.verify(
        functools.partial(made, layers=1, **options), given, nproc=2, inputs=functools.partial(batch, *shape), steps=1,
        optimizer=adamw,
    )  # fmt: skip
    assert receipt.passed, str(receipt)


def _refused(given: mp.Plan) -> str:
    try:
        mp.parallelize(made(), given)
    except mp.PlanError as error:
        return f"{error.code}: {error.message}"
    return "went through"


def test_ranks_without_kernels_are_refused_before_anything_is_sent(pool):
    for said in pool.run(_refused, PLANS["ep 2"], world=2):
        assert said.startswith("experts-fused: experts.dispatch is fused, and the ranks [0, 1] of dp_shard cannot")
