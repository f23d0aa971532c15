"""Grouped matmuls and the gated MLP against float64, one expert after the other: uneven rows, odd widths, every layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.experts import grouped, launch, numbers
from meshplan.kernels.experts.grouped import Packed
from meshplan.kernels.experts.launch import Gather, Groups, Pair
from meshplan.kernels.launch import Machine
from meshplan.ops.experts import grouped as plain
from tests.kernels.interpreted import interpreted

# Of the largest value. Gate and up, the unit and each result are rounded once.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
COUNTS = (18, 0, 3, 33)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.dtype == dtype
    if want.numel():
        error = float((got.detach().double() - want.detach()).abs().max())
        assert error <= TOLERANCE[dtype] * max(1.0, float(want.detach().abs().max())), error


def compare(mine: Any, theirs: Any, tensors: list[Tensor | None]) -> None:
    """`mine` on the tensors, `theirs` on the same in float64: results and gradients."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    wide = [None if t is None else t.double().requires_grad_() for t in tensors]
    out, want = mine(*leaves), theirs(*wide)
    dtype = tensors[0].dtype
    close(out, want, dtype)
    grad = torch.randn(out.shape).to(dtype)
    grads = (
        torch.autograd.grad(y, [t for t in given if t is not None], g)
        for y, given, g in ((out, leaves, grad), (want, wide, grad.double()))
    )
    for got, expected in zip(*grads, strict=True):
        close(got, expected, dtype)


def check_linear(counts, width_in, width_out, turned, bias, dtype) -> None:
    e = len(counts)
    shape = (e, width_in, width_out) if turned else (e, width_out, width_in)
    x, weight = torch.randn(sum(counts), width_in).to(dtype), (torch.randn(shape) * width_in**-0.5).to(dtype)
    b = torch.randn(e, width_out).to(dtype) if bias else None
    compare(
        lambda x, w, b: grouped.grouped_linear(x, counts, w, b, turned),
        lambda x, w, b: plain.grouped_linear(x, counts, w, b, turned),
        [x, weight, b],
    )


def check_mlp(counts, h, f, interleaved, turned, clamped, bias, dtype) -> None:
    e = len(counts)
    shapes = [(e, h, 2 * f), (e, f, h)] if turned else [(e, 2 * f, h), (e, h, f)]
    x = torch.randn(sum(counts), h).to(dtype)
    up, down = (2 * torch.randn(s).to(dtype) * h**-0.5 for s in shapes)
    if clamped:
        up *= 4  # beyond the clamps
    biases = [torch.randn(e, n).to(dtype) if bias else None for n in (2 * f, h)]
    unit = plain.clamped_swiglu if clamped else "silu"

    def theirs(x, up, down, *biases):
        return plain.grouped_mlp(x, counts, up, down, *biases, activation=unit, interleaved=interleaved, turned=turned)

    def mine(x, *tensors):
        return grouped.grouped_mlp(x, counts, Packed(*tensors, Pair(interleaved, clamped), turned))

    compare(mine, theirs, [x, up, down, *biases])


@pytest.mark.parametrize("turned", [False, True])
@interpreted
def test_rows_of_each_expert_times_its_weights(turned):
    torch.manual_seed(0)
    check_linear(COUNTS, 19, 21, turned, True, torch.float32)


@pytest.mark.parametrize(("interleaved", "turned", "clamped"), list(itertools.product((False, True), repeat=3)))
@interpreted
def test_layouts_of_gate_and_up(interleaved, turned, clamped):
    torch.manual_seed(1)
    check_mlp((5, 0, 17), 18, 17, interleaved, turned, clamped, True, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@interpreted
def test_half_precision_is_summed_in_float32(dtype):
    torch.manual_seed(2)
    check_linear((7, 20), 70, 18, False, True, dtype)
    check_mlp((7, 20), 33, 18, False, False, False, False, dtype)


@interpreted
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_drawn_experts_are_those_of_float64(data):
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    counts = tuple(data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 31]), min_size=1, max_size=4), "counts"))
    h, f = data.draw(st.integers(1, 35), "H"), data.draw(st.integers(1, 20), "F")
    turned, bias = data.draw(st.booleans(), "turned"), data.draw(st.booleans(), "bias")
    if data.draw(st.booleans(), "linear"):
        check_linear(counts, h, f, turned, bias, torch.float32)
    else:
        interleaved = data.draw(st.booleans(), "interleaved")
        check_mlp(counts, h, f, interleaved, turned, False, bias, torch.float32)


@interpreted
def test_idle_experts_have_gradients_of_zeros():
    x, w, b = torch.randn(3, 5), torch.randn(3, 4, 5).requires_grad_(), torch.randn(3, 4).requires_grad_()
    for counts in ((0, 3, 0), (0, 0, 0)):
        w.grad = b.grad = None
        grouped.grouped_linear(x[: sum(counts)], counts, w, b).sum().backward()
        for e, count in enumerate(counts):
            assert bool(w.grad[e].any()) == bool(count) and bool((b.grad[e] == count).all())


@interpreted
def test_an_expert_does_not_see_the_next_ones_rows_though_they_be_infinite():
    counts = (3, 20)
    x = torch.randn(23, 8)
    x[3:] = float("inf")
    w = torch.randn(2, 8, 8).requires_grad_()
    out = grouped.grouped_linear(x, counts, w)
    out.backward(torch.cat([torch.randn(3, 8), torch.full((20, 8), float("inf"))]))
    assert out[:3].isfinite().all() and w.grad[0].isfinite().all()


@interpreted
def test_through_tensor_descriptors_as_on_hopper(monkeypatch):
    """Their index arithmetic, in the interpreter: widths that are steps of 16 bytes, and tiles that end outside."""
    monkeypatch.setattr(numbers.Machine, "of", lambda *_: Machine(hopper=True, interpreted=True, processors=3))
    made = []
    rows_launch = launch.rows_launch
    monkeypatch.setattr(grouped, "rows_launch", lambda *a, **k: made.append(rows_launch(*a, **k)) or made[-1])
    torch.manual_seed(3)
    for turned, interleaved in itertools.product((False, True), repeat=2):
        check_mlp((5, 0, 17), 20, 12, interleaved, turned, False, True, torch.float32)
    assert made and all(one.arguments["TMA_A"] and one.arguments["TMA_B"] for one in made)


@interpreted
def test_rows_may_be_gathered_and_waited_for():
    """Rows through a table; every flag stands at the epoch or beyond it."""
    torch.manual_seed(4)
    counts, source = (5, 18), torch.randn(11, 9)
    index = torch.randint(11, (23,))
    experts = Packed(torch.randn(2, 14, 9), torch.randn(2, 9, 7))
    groups = Groups(counts, source.device)
    flags = torch.tensor([3, 4, 3], dtype=torch.int32)
    y, h = grouped.mlp_forward(source, experts, groups, True, Gather(index, flags, 4, 3))
    wanted, kept = grouped.mlp_forward(source[index], experts, groups, True)
    assert torch.equal(y, wanted) and torch.equal(h, kept)


@interpreted
def test_backward_may_run_twice():
    x, up, down = torch.randn(6, 4).requires_grad_(), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    out = grouped.grouped_mlp(x, (2, 4), Packed(up, down)).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@interpreted
def test_the_operator_hands_its_tensors_over(monkeypatch):
    """What it does on CUDA: fused where it knows the unit, by matmuls elsewhere; refusals are its own."""
    torch.manual_seed(5)
    monkeypatch.setattr(plain, "fastest", lambda first, *_: None if first.dtype == torch.float64 else grouped)
    fused = []
    monkeypatch.setattr(grouped, "grouped_mlp", lambda *a, f=grouped.grouped_mlp: fused.append(1) or f(*a))
    x, up, down, down_bias = torch.randn(9, 6), torch.randn(3, 10, 6), torch.randn(3, 7, 5), torch.randn(3, 7)
    for activation, count in (("silu", 1), ("gelu", 1), (plain.clamped_swiglu, 2)):

        def call(x, up, down, down_bias, activation=activation):
            return plain.grouped_mlp(x, (4, 0, 5), up, down, None, down_bias, activation=activation)

        compare(call, call, [x, up, down, down_bias])
        assert len(fused) == count
    for wrong in (torch.randn(3, 7, 4), torch.randn(2, 7, 5)):
        with pytest.raises(PlanError) as caught:
            plain.grouped_mlp(x, (4, 0, 5), up, wrong)
        assert caught.value.code == "experts-shape"


def test_on_cpu_the_plain_operations_stay():
    assert plain.fastest(torch.zeros(2, 3), None) is None


@interpreted
def test_what_the_kernels_do_not_take_is_refused():
    x, w = torch.zeros(3, 4), torch.zeros(1, 4, 4)
    for bad in ((x.double(), w.double()), (x, w.half())):
        with pytest.raises(PlanError) as caught:
            grouped.grouped_linear(bad[0], (3,), bad[1])
        assert caught.value.code == "experts-kernel"
