"""Permute, unpermute and combine against the plain operators in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.errors import PlanError
from meshplan.kernels.experts import gather
from meshplan.ops.experts import routing
from tests.kernels.interpreted import interpreted

# Of the largest value: rounded once from float32 sums.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    if want.numel():
        assert float((got.detach().double() - want.detach()).abs().max()) <= TOLERANCE[got.dtype] * max(
            1.0, float(want.detach().abs().max())
        )


def pairs_for(m: int, k: int, experts: int, seed: int, holes: bool) -> routing.Pairs:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randint(-1 if holes else 0, experts, (m, k), generator=draw)
    slots, counts = routing.sorted_slots(keys, experts)
    return routing.pairs_of(slots, int(counts.sum()), k)


def check(m: int, k: int, width: int, dtype: torch.dtype, seed: int, holes: bool) -> None:
    pairs = pairs_for(m, k, 5, seed, holes)
    draw = torch.Generator().manual_seed(seed + 1)
    n = pairs.rows.shape[0]
    x, y, weights = (torch.randn(s, generator=draw).to(dtype) for s in ((m, width), (n, width), (m, k)))
    calls = {
        "expand": ((x,), (n, width)),
        "collect": ((y,), (m, width)),
        "combine": ((y, weights), (m, width)),
    }
    for name, (inputs, shape) in calls.items():
        grad = torch.randn(shape, generator=draw).to(dtype)
        mine = [t.clone().requires_grad_() for t in inputs]
        wide = [t.double().requires_grad_() for t in inputs]
        out, want = getattr(gather, name)(*mine, pairs), getattr(routing, name)(*wide, pairs)
        assert out.dtype == dtype
        close(out, want)
        grads = torch.autograd.grad(out, mine, grad), torch.autograd.grad(want, wide, grad.double())
        for got, expected in zip(*grads, strict=True):
            close(got, expected)
        if name == "expand":
            assert torch.equal(out, x[pairs.rows])


@interpreted
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_drawn_rows_are_moved_and_summed_as_the_operators_do(data):
    check(
        data.draw(st.integers(0, 19), "rows"),
        data.draw(st.integers(1, 8), "k"),
        data.draw(st.integers(1, 37), "width"),
        data.draw(st.sampled_from(list(TOLERANCE)), "dtype"),
        data.draw(st.integers(0, 99), "seed"),
        data.draw(st.booleans(), "holes"),
    )


@interpreted
def test_half_precision_is_summed_in_float32_and_rounded_once():
    k = 8
    pairs = pairs_for(1, k, 1, 0, False)
    y = torch.full((k, 1), 2.0**-9, dtype=torch.bfloat16)
    y[0] = 1.0
    assert gather.collect(y, pairs).item() == 1.015625  # 1 + 7/512: one by one it would stay 1
    assert gather.combine(y, torch.ones(1, k), pairs).item() == 1.015625
    tie = torch.tensor([[1.0], [3 * 2.0**-8]], dtype=torch.bfloat16)  # between 1 + 2/256 and 1 + 4/256: to the even one
    assert gather.collect(tie, pairs_for(1, 2, 1, 0, False)).item() == 1 + 4 / 256


@interpreted
def test_weights_of_another_dtype_and_rows_that_do_not_lie_together():
    pairs = pairs_for(7, 3, 4, 2, True)
    n = pairs.rows.shape[0]
    y, weights = torch.randn(5, n).T.to(torch.bfloat16).requires_grad_(), torch.randn(7, 3).requires_grad_()
    grad = torch.randn(5, 7).T.to(torch.bfloat16)
    leaves = y.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    out, want = gather.combine(y, weights, pairs), routing.combine(*leaves, pairs)
    close(out, want)
    mine, wide = (
        torch.autograd.grad(out, (y, weights), grad),
        torch.autograd.grad(want, leaves, grad.double()),
    )
    for got, expected in zip(mine, wide, strict=True):
        close(got, expected)
    assert mine[0].dtype == torch.bfloat16 and mine[1].dtype == torch.float32


@interpreted
def test_rows_that_nothing_is_routed_to_are_zero():
    pairs = routing.pairs_of(torch.arange(6), 0, 2)
    empty = torch.empty(0, 4, requires_grad=True)
    out = gather.combine(empty, torch.ones(3, 2), pairs)
    assert out.tolist() == [[0.0] * 4] * 3
    (grad,) = torch.autograd.grad(out.sum(), empty)
    assert grad.shape == (0, 4)
    assert gather.expand(torch.ones(3, 4), pairs).shape == (0, 4)


@interpreted
def test_integers_and_second_derivatives_are_refused():
    pairs = pairs_for(2, 1, 1, 0, False)
    with pytest.raises(PlanError) as caught:
        gather.expand(torch.zeros(2, 3, dtype=torch.int64), pairs)
    assert caught.value.code == "experts-kernel"
    y, w = torch.ones(2, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    with pytest.raises(PlanError) as caught:
        torch.autograd.grad(gather.combine(y, w, pairs).square().sum(), y, create_graph=True)
    assert caught.value.code == "second-derivative"
