"""Grouped experts against one expert after another, in every layout of packed weights; idle experts' gradients are zeros."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts import grouped
from meshplan.ops.experts.grouped import clamped_swiglu, grouped_linear, grouped_mlp

E, H, W = 4, 5, 3
COUNTS = (3, 0, 4, 1)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def one_by_one(x, up, down, up_bias, down_bias, unit, interleaved, turned):
    out, start = [], 0
    for e, count in enumerate(COUNTS):
        rows, start = x[start : start + count], start + count
        h = rows @ (up[e] if turned else up[e].T) + up_bias[e]
        halves = (h[:, ::2], h[:, 1::2]) if interleaved else (h[:, :W], h[:, W:])
        out.append(unit(*halves) @ (down[e] if turned else down[e].T) + down_bias[e])
    return torch.cat(out)


@pytest.mark.parametrize("interleaved, turned", list(itertools.product((False, True), repeat=2)))
def test_layouts_of_gate_and_up(interleaved, turned):
    torch.manual_seed(0)
    x, up_bias, down_bias = draw(sum(COUNTS), H), draw(E, 2 * W), draw(E, H)
    up, down = (draw(E, H, 2 * W), draw(E, W, H)) if turned else (draw(E, 2 * W, H), draw(E, H, W))
    leaves = (x, up, down, up_bias, down_bias)
    for activation, unit in (("silu", lambda g, u: F.silu(g) * u), (clamped_swiglu, clamped_swiglu)):
        found = grouped_mlp(
            x, COUNTS, up, down, up_bias, down_bias, activation=activation, interleaved=interleaved, turned=turned
        )
        expected = one_by_one(*leaves, unit, interleaved, turned)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        grad = torch.randn_like(found)
        for got, want in zip(
            torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_experts_without_a_gate_and_without_biases():
    x, up, down = draw(sum(COUNTS), H), draw(E, W, H), draw(E, H, W)
    found = grouped_mlp(x, COUNTS, up, down, activation="relu2", gated=False)
    own = torch.arange(E).repeat_interleave(torch.tensor(COUNTS))
    hidden = F.relu(torch.einsum("nh,nfh->nf", x, up[own])).square()
    torch.testing.assert_close(found, torch.einsum("nf,nhf->nh", hidden, down[own]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0, 0)])
def test_idle_experts_have_gradients_of_zeros(counts):
    x, weight, bias = draw(sum(counts), H), draw(E, W, H), draw(E, W)
    grouped_linear(x, counts, weight, bias).sum().backward()
    for e, count in enumerate(counts):
        assert bool(weight.grad[e].any()) == bool(count) and bool((bias.grad[e] == count).all())
    assert x.grad.shape == x.shape


def test_autocast_computes_as_for_linear():
    x, weight = draw(sum(COUNTS), H).float(), draw(E, W, H).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grouped_linear(x, COUNTS, weight)
        expected = torch.cat([F.linear(rows, w) for rows, w in zip(x.split(COUNTS), weight, strict=True)])
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize("turned", [False, True])
def test_one_launch_is_the_same_as_one_matmul_an_expert(turned, monkeypatch):
    """torch's grouped matmul, here on the CPU: what it is handed, and that idle experts get zeros."""
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS), 16).bfloat16().requires_grad_()
    weight = torch.randn((E, 16, 8) if turned else (E, 8, 16)).bfloat16().requires_grad_()
    bias = torch.randn(E, 8).bfloat16().requires_grad_()
    grad, results = torch.randn(sum(COUNTS), 8).bfloat16(), []
    for one_launch in (False, True):
        monkeypatch.setattr(grouped, "_in_one_launch", lambda *_, answer=one_launch: answer)
        out = grouped_linear(x, COUNTS, weight, bias, turned)
        results.append((out, *torch.autograd.grad(out, (x, weight, bias), grad)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert not results[1][2][1].any()


def test_gptoss_unit_is_clamped():
    gate, up = torch.tensor([20.0, -20.0]), torch.tensor([20.0, -20.0])
    expected = torch.tensor(
        [8 * 7 * torch.sigmoid(torch.tensor(7 * 1.702)), -6 * -20 * torch.sigmoid(torch.tensor(-20 * 1.702))]
    )
    torch.testing.assert_close(clamped_swiglu(gate, up), expected)


def test_what_does_not_fit_is_refused():
    x, weight = draw(3, H), draw(2, W, H)
    bad = [((2, 2), weight, None), ((3,), weight, None), ((1, 2), draw(2, H, W), None), ((1, 2), weight, draw(2, H))]
    for counts, w, bias in bad:
        with pytest.raises(PlanError) as refusal:
            grouped_linear(x, counts, w, bias)
        assert refusal.value.code == "experts-shape"
    with pytest.raises(PlanError) as refusal:
        grouped_mlp(x, (1, 2), weight, weight, activation="swish")
    assert refusal.value.code == "bad-value"
