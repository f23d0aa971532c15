"""Gradients are packed into buckets of one dtype, reduced once, and never reduced twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.gradients import Gradients, Reduction, bucket_sizes


def test_buckets_hold_one_dtype_and_a_limit():
    sizes = [(10, "float32"), (5, "float32"), (4, "float64"), (2, "float64"), (100, "float64"), (1, "float32")]
    assert bucket_sizes(sizes, limit=80) == [
        (2, 15, "float32"),
        (2, 6, "float64"),
        (1, 100, "float64"),  # larger than the limit: a bucket of its own
        (1, 1, "float32"),
    ]
    assert bucket_sizes([]) == []


class Doubling(AxisGroup):
    """A group whose all_reduce doubles: two ranks with equal contributions."""

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return x * 2


def backward(p: nn.Parameter, gradients: Gradients, factor: float) -> None:
    out = p.sum() * factor
    gradients.watch(out)
    out.backward()


def test_a_second_backward_reduces_only_what_it_added():
    p = nn.Parameter(torch.ones(3))
    gradients = Gradients([Reduction((p,), (Doubling("tp", 2, 0),), None)])
    backward(p, gradients, 1.0)
    assert p.grad is not None and torch.equal(p.grad, torch.full((3,), 2.0))
    backward(p, gradients, 5.0)
    assert torch.equal(p.grad, torch.full((3,), 2.0 + 10.0))


def test_a_mean_divides_by_the_ranks():
    p = nn.Parameter(torch.ones(2))
    gradients = Gradients([Reduction((p,), (), Doubling("dp_shard", 2, 0))])
    backward(p, gradients, 3.0)
    assert p.grad is not None and torch.equal(p.grad, torch.full((2,), 3.0))


class Beside(AxisGroup):
    """A group of two, the other of which reached the first of two parameters, with a gradient of zeros, and not the second."""

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return x + torch.tensor([0, 0, 0, 0, 1.0, 1, 0])  # gradients of two, two and one numbers, then who reached the first two


def test_a_gradient_that_comes_to_zero_is_there_and_one_that_no_rank_has_is_not():
    a, b, c = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    gradients = Gradients([Reduction((a, b, c), (), Beside("dp_shard", 2, 0), apart=(a, b))])
    backward(c, gradients, 3.0)
    assert a.grad is not None and torch.equal(a.grad, torch.zeros(2)) and b.grad is None
    assert c.grad is not None and c.grad.item() == 2.0


def test_nothing_is_reduced_while_deferred():
    p = nn.Parameter(torch.ones(2))
    gradients = Gradients([Reduction((p,), (Doubling("tp", 2, 0),), None)])
    gradients.accumulating = gradients.deferred = True
    backward(p, gradients, 1.0)
    gradients.deferred = False
    backward(p, gradients, 1.0)
    assert p.grad is not None and torch.equal(p.grad, torch.full((2,), 4.0))  # (1 + 1) summed once


def test_gradients_that_would_be_returned_partial_are_refused():
    p = nn.Parameter(torch.ones(3))
    gradients = Gradients([Reduction((p,), (Doubling("tp", 2, 0),), None)])
    out = (p * 2).sum()
    gradients.watch(out)
    with pytest.raises(PlanError) as refused:
        torch.autograd.grad(out, [p])
    assert refused.value.code == "autograd-grad"


def test_a_gradient_with_respect_to_something_else_is_returned():
    p, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    gradients = Gradients([Reduction((p,), (Doubling("tp", 2, 0),), None)])
    out = (p * x).sum()
    gradients.watch(out)
    (grad,) = torch.autograd.grad(out, [x])
    assert torch.equal(grad, torch.ones(3))
