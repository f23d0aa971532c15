"""Rows in 8 bits: the error that is promised, the same numbers by every way to dispatch, and the bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts.cost import Routed, bytes_sent, collectives
from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.payload import BLOCK, pack, packed_width, unpack
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives
from tests.ops.experts.reference import Case, H, check, on_rank, simulated
from tests.ops.experts.test_cost import DTYPE, WEIGHTS, _bare, rows_of, run

METHODS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dedup": {"dedup": True},
    "allgather": {"dispatch": "allgather"},
    "twolevel": {"dispatch": "twolevel", "dedup": True, "nodes": 2},
}


def arrived(x: Tensor) -> Tensor:
    return unpack(pack(x), x.shape[1], x.dtype)


def bound(x: Tensor) -> Tensor:
    """The page's, in float64, with the scale that it says is the largest."""
    tiles = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    most = tiles.abs().amax(-1, keepdim=True)
    scale = torch.where(most / 224 > 2.0**-126, most / 224, 2.0**-126).expand_as(tiles).flatten(1)[:, : x.shape[1]]
    return torch.maximum(x.double().abs() / 16, scale / 1024)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_the_error_is_within_its_bound(data):
    width = data.draw(st.sampled_from([1, 5, 127, 128, 129, 300]), "width")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), "dtype")
    low, high = sorted(data.draw(st.tuples(st.integers(-148, 126), st.integers(-148, 126)), "powers of two"))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    powers = torch.randint(low, high + 1, (3, width), generator=draw)
    x = torch.ldexp(torch.randn(3, width, generator=draw).clamp(-3.9, 3.9), powers).to(dtype)
    out = arrived(x)
    assert out.dtype == dtype and out.shape == x.shape
    assert bool(((out.double() - x.double()).abs() <= bound(x)).all())
    assert torch.equal(arrived(out), out)


def test_numbers_of_8_bits_arrive_as_they_are():
    """Every e4m3 number, with every scale at which float32 holds them all."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    for power in range(-126, 118):
        x = torch.ldexp(codes, torch.tensor(power))[None]
        assert torch.equal(arrived(x), x), power


def test_the_largest_numbers_of_a_dtype_stay_finite_and_zeros_zero():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        most = torch.finfo(dtype).max
        out = arrived(torch.tensor([[most, -most, 0.0]], dtype=dtype))
        assert out.tolist() == [[most, -most, 0.0]]
    assert torch.equal(arrived(torch.zeros(2, 130)), torch.zeros(2, 130))
    assert arrived(torch.zeros(0, 130)).shape == (0, 130)


def test_a_block_that_is_not_finite_arrives_as_nan_and_others_as_they_would():
    for wrong in (float("nan"), float("inf"), float("-inf"), 1e300):
        x = torch.ones(2, 130, dtype=torch.float64)
        x[0, 3] = wrong
        out = arrived(x)
        assert bool(out[0, :BLOCK].isnan().all()) and torch.equal(out[0, BLOCK:], x[0, BLOCK:])
        assert torch.equal(out[1], x[1])


def test_blocks_have_scales_of_their_own():
    """0.003 beside 448 is between two of the coarsest steps; in a block of its own it has four significant bits."""
    x = torch.full((1, 256), 0.003)
    x[0, 0] = 448.0
    error = (arrived(x) - x).abs()[0]
    assert error[1] > 0.003 / 16 > error[200]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("routing", ["random", "same", "holes"])
def test_experts_see_what_arrived_whichever_way_it_came(method, routing):
    """Equal to one device on rounded tokens, whose gradients are not rounded."""
    case = Case((3, 0, 6, 2), k=3, routing=routing)
    check(case, simulated(case, METHODS[method] | {"payload": "fp8"}), arrived)


def test_one_rank_rounds_as_several():
    case = Case((5,), k=2)
    check(case, simulated(case, {"payload": "fp8"}), arrived)


def test_results_and_gradients_are_not_rounded():
    def work(case: Case, group: AxisGroup, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        x = torch.full((2, 3), 1.5, requires_grad=True)
        ones = torch.ones(2, 1)
        out = routed_experts(
            x, torch.tensor([[0], [1]]), ones, lambda x, _: x * 1.0001, experts=2, group=group, payload="fp8"
        )
        out.backward(torch.full_like(out, 1.0003))
        return out.detach(), x.grad

    for out, grad in simulated(Case((2, 2)), {}, work):
        assert torch.equal(out, torch.full((2, 3), 1.5) * 1.0001)
        assert torch.equal(grad, torch.full((2, 3), 1.0003) * 1.0001)


CASE = Case((3, 0, 6, 2), k=3)


def _on_gloo(method: str) -> tuple[dict[str, Tensor], list[Any], list[Any]]:
    group = AxisGroup("ep", 4, dist.get_rank(), dist.group.WORLD.group_name)  # type: ignore[union-attr]
    options = METHODS[method] | {"payload": "fp8"}
    with record_collectives() as log:
        run(rows_of(CASE)[group.rank], CASE.experts, group, options)
    x = dataclasses.replace(Routed.of(rows_of(CASE), CASE.experts, H, DTYPE, WEIGHTS), payload="fp8")
    said = [c for phase in ("forward", "backward") for c in collectives(method, x, group, phase=phase)]
    made = [(c.op, c.elements, c.dtype) for c in log]
    return on_rank(CASE, group, options), made, [(c.op, c.elements, _bare(c.dtype)) for c in said]


@pytest.mark.parametrize("method", ["alltoall", "dedup", "allgather"])
def test_gloo_ranks_send_bytes_as_announced(pool, method):
    ranks = pool.run(_on_gloo, method)
    check(CASE, [found for found, _, _ in ranks], arrived)
    for _, made, said in ranks:
        assert made == said and sum(dtype == "uint8" for _, _, dtype in made) == 1


def test_scales_are_counted():
    """7168 numbers are 56 blocks: 7224 bytes for 14336. 3 of 4 tokens leave rank 0."""
    chosen = [torch.arange(4)[:, None]] * 4
    x = Routed.of(chosen, 4, 7168, torch.bfloat16, torch.float32)
    packed, group = dataclasses.replace(x, payload="fp8"), AxisGroup("ep", 4, 0)
    assert packed_width(7168) == 7224
    assert bytes_sent("alltoall", x, group) - bytes_sent("alltoall", packed, group) == 3 * (14336 - 7224)
    assert bytes_sent("alltoall", x, group, phase="backward") == bytes_sent("alltoall", packed, group, phase="backward")


def test_an_unknown_payload_is_refused():
    with pytest.raises(PlanError) as refusal:
        routed_experts(
            torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), lambda x, _: x,
            experts=1, group=AxisGroup("ep", 1, 0), payload="int4",
        )  # fmt: skip
    assert refusal.value.code == "bad-value"
