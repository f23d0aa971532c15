"""A plan's `dispatch: fused` on gloo ranks that share memory, its kernels interpreted: exact, listed as it runs, or refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshplan as mp
from meshplan.verify.pool import RankPool
from tests.distributed.moe_blocks import Counting
from tests.distributed.test_experts import adamw, batch, made, plan
from tests.distributed.test_experts_blocks import made as looped
from tests.distributed.test_experts_blocks import plan as blocks
from tests.distributed.training import full

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


def _matmuls(given: mp.Plan) -> tuple[float, dict[str, torch.Tensor], int]:
    """A step in float32: the loss, gradients, and how often the kernels made the experts' first matmul."""
    from meshplan.kernels.experts import fused

    calls, own = [0], fused.mlp_forward

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return own(*args)

    fused.mlp_forward = counted
    try:
        model = mp.parallelize(made(layers=1).float(), given)
        loss = model(**mp.shard_batch(model, batch()))
        loss.backward()
    finally:
        fused.mlp_forward = own
    return loss.item(), {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}, calls[0]


def test_the_first_matmul_of_a_gated_mlp_begins_on_rows_as_they_arrive(interpreting):
    single = made(layers=1).float()
    single(**batch()).backward()
    for _, gradients, calls in interpreting.run(_matmuls, PLANS["ep 2 of tp, tokens whole"], world=2):
        assert calls == 1
        for name, p in single.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


def _refused(given: mp.Plan) -> str:
    try:
        mp.parallelize(made(), given)
    except mp.PlanError as error:
        return f"{error.code}: {error.message}"
    return "went through"


def test_ranks_without_kernels_are_refused_before_anything_is_sent(pool):
    for said in pool.run(_refused, PLANS["ep 2"], world=2):
        assert said.startswith("experts-fused: experts.dispatch is fused, and the ranks [0, 1] of dp_shard cannot")


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}])
def test_rows_of_a_block_that_loops_over_its_experts_travel_so_too(interpreting, mesh):
    given = blocks(mesh, experts={"ep": 2, "dispatch": "fused"}, **(FSDP if "dp_shard" in mesh else {}))
    factory = functools.partial(looped, Counting, layers=1)
    receipt = mp.verify(factory, given, nproc=2, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)
