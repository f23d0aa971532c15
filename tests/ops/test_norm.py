"""Norms over a split dim are torch's norms: value and all gradients, on uneven and empty shards."""

import math

import pytest
import torch
import torch.nn.functional as F

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.norm import collectives, layer_norm, rms_norm
from meshplan.runtime.comm import AxisGroup, chunk_sizes
from tests.ops.simulated import run_ranks

EXACT = {"rtol": 4e-14, "atol": 4e-15}


def tensors(shape, normalized, seed, offset=0.0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, *normalized, generator=draw, dtype=dtype) * 2 + offset
    weight, bias = torch.randn(2, *normalized, generator=draw, dtype=dtype)
    return x, weight, bias, torch.randn(x.shape, generator=draw, dtype=dtype)


def on_ranks(kind, n, x, weight, bias, upstream, normalized, dim, **options):
    """Gathered output and gradients of x, weight, bias, and the collectives of rank 0."""

    def rank(groups):
        group = groups["tp"]

        def cut(t):
            return None if t is None else t.split(chunk_sizes(t.shape[dim], n), dim)[group.rank].clone()

        leaves = [None if t is None else cut(t).requires_grad_() for t in (x, weight, bias)]
        if kind == "rms_norm":
            out = rms_norm(leaves[0], normalized, leaves[1], group=group, dim=dim, **options)
        else:
            out = layer_norm(leaves[0], normalized, *leaves[1:], group=group, dim=dim, **options)
        forward = list(group.log)
        out.backward(cut(upstream))
        backward = group.log[len(forward) :]
        return [out.detach(), *(None if t is None else t.grad for t in leaves)], forward, backward

    ranks = run_ranks({"tp": n}, rank)
    parts = zip(*(values for values, _, _ in ranks), strict=True)
    return [None if p[0] is None else torch.cat(p, dim) for p in parts], ranks[0][1], ranks[0][2]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("n", "shape", "normalized", "dim"),
    [(2, (4, 3), (7,), -1), (4, (3,), (5,), -1), (2, (), (9,), -1), (2, (3, 2), (5, 4), -2), (3, (2,), (2, 7), -1)],
)
def test_value_and_gradients_are_those_of_one_device(kind, n, shape, normalized, dim, affine):
    x, weight, bias, upstream = tensors(shape, normalized, seed=n, offset=3.0)
    weight, bias = (weight, bias if kind == "layer_norm" else None) if affine else (None, None)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    if kind == "rms_norm":
        expected = F.rms_norm(leaves[0], normalized, leaves[1], eps=1e-3)
    else:
        expected = F.layer_norm(leaves[0], normalized, leaves[1], leaves[2], eps=1e-3)
    expected.backward(upstream)
    got, forward, backward = on_ranks(kind, n, x, weight, bias, upstream, normalized, dim, eps=1e-3)
    for value, reference in zip(got, [expected.detach(), *(t if t is None else t.grad for t in leaves)], strict=True):
        assert (value is None) == (reference is None)
        if value is not None:
            torch.testing.assert_close(value, reference, **EXACT)
    rows = math.prod(shape)
    group = AxisGroup("tp", n, 0)
    assert forward == collectives(kind, rows, group=group)
    assert backward == collectives(kind, rows, group=group, phase="backward")


def test_the_collectives_are_one_and_two_forward_one_backward():
    group = AxisGroup("tp", 2, 0)
    assert collectives("rms_norm", 12, group=group) == [Call("all_reduce", "tp", 12)]
    assert collectives("rms_norm", 12, group=group, phase="backward") == [Call("all_reduce", "tp", 12)]
    assert collectives("layer_norm", 12, group=group) == [Call("all_reduce", "tp", 12)] * 2
    assert collectives("layer_norm", 12, group=group, phase="backward") == [Call("all_reduce", "tp", 24)]
    assert collectives("layer_norm", 12, group=AxisGroup("tp", 1, 0)) == []


def test_layer_norm_of_a_small_spread_around_a_large_mean_keeps_its_digits():
    x, weight, bias, upstream = tensors((4,), (9,), seed=1, offset=1e6)
    got, _, _ = on_ranks("layer_norm", 2, x, weight, bias, upstream, (9,), -1)
    torch.testing.assert_close(got[0], F.layer_norm(x, (9,), weight, bias), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_eps_of_rms_norm_is_torchs(dtype):
    x = torch.full((2, 6), 1e-4, dtype=dtype)
    got, _, _ = on_ranks("rms_norm", 2, x, None, None, torch.ones_like(x), (6,), -1)
    torch.testing.assert_close(got[0], F.rms_norm(x, (6,)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_bfloat16_is_computed_in_float32_and_rounded_once(kind):
    x, weight, bias, upstream = tensors((5,), (33,), seed=2, dtype=torch.float32)
    half = [t.bfloat16() for t in (x, weight, bias, upstream)]
    if kind == "rms_norm":
        half[2] = None
    got, _, _ = on_ranks(kind, 2, *half, (33,), -1, eps=1e-5)
    leaves = [None if t is None else t.double().requires_grad_() for t in half[:3]]
    exact = (
        F.rms_norm(*leaves[:1], (33,), leaves[1], 1e-5)
        if kind == "rms_norm"
        else F.layer_norm(leaves[0], (33,), leaves[1], leaves[2], 1e-5)
    )
    exact.backward(half[3].double())
    for value, reference in zip(got, [exact.detach(), *(t if t is None else t.grad for t in leaves)], strict=True):
        if value is not None:
            assert value.dtype == torch.bfloat16
            torch.testing.assert_close(value.double(), reference, rtol=2.0**-8, atol=1e-5)


def test_wrong_shards_are_refused():
    group = AxisGroup("tp", 2, 1)  # of 7, rank 1 holds 3
    for call in (
        lambda: rms_norm(torch.zeros(2, 4), (7,), group=group),
        lambda: rms_norm(torch.zeros(2, 3), (7,), torch.ones(7), group=group),
        lambda: layer_norm(torch.zeros(2, 3), (7,), torch.ones(3), torch.ones(4), group=group),
        lambda: layer_norm(torch.zeros(2, 3), (7,), group=group, dim=-2),
    ):
        with pytest.raises(PlanError) as refusal:
            call()
        assert refusal.value.code == "norm-shape"
    assert rms_norm(torch.zeros(2, 3), (7,), torch.ones(3), group=group).shape == (2, 3)


def test_a_second_derivative_is_refused_rather_than_wrong():
    for norm in (rms_norm, layer_norm):
        x = torch.randn(2, 3, requires_grad=True)
        with pytest.raises(PlanError) as refusal:
            torch.autograd.grad(norm(x, (3,), group=AxisGroup("tp", 1, 0)).sum(), x, create_graph=True)
        assert refusal.value.code == "second-derivative"
