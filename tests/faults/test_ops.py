"""Operators where sharded computation goes wrong: partial sums, norms, convolutions, in-place writes, custom functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Between(nn.Module):
    """up -> an operation of choice on the split or partial value -> down."""

    def __init__(self, name: str, hidden: int = 6) -> None:
        super().__init__()
        self.up, self.down, self.operation = nn.Linear(4, hidden), nn.Linear(hidden, 4), OPERATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self, x)


class Scaled(torch.autograd.Function):
    """A custom function on elements: y = x^3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3 * ctx.saved_tensors[0].square()


class OwnLinear(torch.autograd.Function):
    """A custom matrix product, with the backward of one device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


def _sum(y: Tensor) -> Tensor:
    return y.square().sum()


def _in_place(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    h = h * 1.0
    h.add_(1.0).mul_(0.5).clamp_(min=-0.3)
    return _sum(m.down(h))


def _column_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.up(x) * 1.0
    h[..., 0] = 0.0
    return _sum(m.down(h))


def _rows_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.up(x) * 1.0
    h[1:] += 1.0
    return _sum(m.down(h))


def _by_count(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return _sum(m.down(h * (h.shape[-1] ** -0.5)))


def _numel(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return h.square().sum() / h.numel() + _sum(m.down(h)) / x.shape[0]


def _cumsum(dim: int) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: _sum(m.down(m.up(x).cumsum(dim)))


def _sizes_of_another(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    whole = h.softmax(-1).flatten(0, -2)  # its own layout is not that of what gives it sizes
    return _sum(m.down(h + whole.view_as(h) + h.flatten().reshape_as(h)))


OPERATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sizes of another tensor": _sizes_of_another,
    "number added to a partial sum": lambda m, x: (m.down(torch.tanh(m.up(x))) + 10.0).pow(3).sum(),
    "norm of a partial sum": lambda m, x: m.down(torch.tanh(m.up(x))).norm(dim=-1).sum(),
    "partial sum times a number, thrice": lambda m, x: sum((m.down(m.up(x)).mean() * i).square() for i in (1, 2, 3)),
    "einsum": lambda m, x: _sum(torch.einsum("bsh,dh->bsd", torch.tanh(m.up(x)), m.down.weight) + m.down.bias),
    "softmax over split": lambda m, x: _sum(m.down(m.up(x).softmax(-1))),
    "layer norm over split": lambda m, x: _sum(m.down(F.layer_norm(m.up(x), (m.up.out_features,)))),
    "rms norm over split": lambda m, x: _sum(m.down(F.rms_norm(m.up(x), (m.up.out_features,)))),
    "rms norm by hand": lambda m, x: _sum(m.down((h := m.up(x)) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))),
    "normalize over split": lambda m, x: _sum(m.down(F.normalize(m.up(x), dim=-1))),
    "std over split": lambda m, x: _sum(m.down((h := m.up(x)) / h.std(-1, keepdim=True))),
    "cumsum over split": _cumsum(-1),
    "cumsum along the sequence": _cumsum(-2),
    "max over split": lambda m, x: _sum(m.down((h := m.up(x)) - h.amax(-1, keepdim=True))),
    "topk over split": lambda m, x: _sum(m.up(x).topk(3, -1).values),
    "sort over split": lambda m, x: _sum(m.down(m.up(x).sort(-1).values)),
    "argmax over split": lambda m, x: _sum(m.down(m.up(x) * F.one_hot(m.up(x).argmax(-1), m.up.out_features))),
    "flip of split": lambda m, x: _sum(m.down(m.up(x).flip(-1))),
    "roll of split": lambda m, x: _sum(m.down(m.up(x).roll(1, -1))),
    "slice of split": lambda m, x: _sum(m.down(F.pad(m.up(x)[..., 1:], (0, 1)))),
    "index of split": lambda m, x: _sum(m.up(x)[..., 2]),
    "cat of split and whole": lambda m, x: _sum(m.down(torch.cat([m.up(x)[..., :2], x[..., :2], x[..., 2:]], -1))),
    "unbind of split": lambda m, x: _sum(torch.stack(m.up(x).unbind(-1)[::-1], -1)),
    "unfold of split": lambda m, x: _sum(m.up(x).unfold(-1, 2, 2)),
    "masked fill": lambda m, x: _sum(m.down(m.up(x).masked_fill(x[..., :1] > 0, 2.0))),
    "where of its own": lambda m, x: _sum(m.down(torch.where((h := m.up(x)) > 0, h, -1.5))),
    "written in place": _in_place,
    "rows written in place": _rows_in_place,
    "a column written in place": _column_in_place,
    "a number from a size": _by_count,
    "a mean from numel": _numel,
    "mean of the output": lambda m, x: m.up(x).mean(),
    "mean of a square": lambda m, x: m.up(x).square().mean(),
    "var": lambda m, x: m.up(x).var(),
    "logsumexp": lambda m, x: m.up(x).logsumexp(-1).sum(),
    "prod over split": lambda m, x: m.up(x).prod(-1).sum(),
    "norm of all": lambda m, x: m.up(x).norm(),
    "outer product": lambda m, x: _sum((h := m.up(x)).transpose(-1, -2) @ h),
    "gram": lambda m, x: _sum((h := m.up(x)) @ h.transpose(-1, -2)),
    "custom function on elements": lambda m, x: _sum(m.down(Scaled.apply(m.up(x)))),
    "custom function on a whole value": lambda m, x: _sum(m.up(Scaled.apply(m.down(m.up(x))))),
    "detached": lambda m, x: _sum(m.down((h := m.up(x)) - h.detach().mean(-1, keepdim=True))),
    "no grad block": lambda m, x: _sum(m.down(m.up(x) * no_grad_scale(m, x))),
}


def no_grad_scale(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return 1 / m.up(x).abs().amax(-1, keepdim=True)


PAIR = (mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "a column written in place"])
def test_an_operation_on_a_split_or_partial_value(name):
    exact(partial(Between, name), plan_of({"x": numbers(3, 5, 4)}, *PAIR))


UNEVEN = [
    "mean of a square",
    "var",
    "rms norm by hand",
    "layer norm over split",
    "softmax over split",
    "number added to a partial sum",
    "a mean from numel",
    "std over split",
]


@pytest.mark.parametrize("name", UNEVEN)
def test_an_operation_on_unequal_shards(name):
    exact(partial(Between, name, hidden=7), plan_of({"x": numbers(3, 5, 4)}, *PAIR))


DATA = [
    "sizes of another tensor",
    "mean of a square",
    "var",
    "softmax over split",
    "cumsum along the sequence",
    "written in place",
    "a mean from numel",
    "custom function on elements",
    "norm of all",
]


@pytest.mark.parametrize("name", DATA)
def test_an_operation_on_a_split_batch(name):
    exact(partial(Between, name), plan_of({"x": numbers(4, 5, 4, dp=mp.S(0))}, mesh={"dp_shard": 2}))


def test_a_write_at_a_place_that_only_one_rank_holds_is_refused():
    # Written into a gathered copy, it would be lost.
    error = refused(partial(Between, "a column written in place"), plan_of({"x": numbers(3, 5, 4)}, *PAIR), "in-place")
    assert error.where.file == __file__ and error.where.line


class CustomProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _sum(self.down(OwnLinear.apply(torch.tanh(self.embed(x)), self.up.weight)))


def test_a_custom_function_whose_input_needs_a_reduction_in_backward_is_refused():
    # Its backward gives each rank the part of its own columns, and nobody would know to sum them.
    error = refused(
        CustomProduct,
        plan_of({"x": numbers(3, 4)}, mp.Rule("up", params={"weight": {"tp": mp.S(0)}}), PAIR[1]),
        "custom-function",
    )
    assert error.where.file == __file__ and error.where.line


class InsideLinear(torch.autograd.Function):
    """tanh and a matrix product in one: what the product uses was made with gradients off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x) * 1.5
        ctx.save_for_backward(h, w)
        return h @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        h, w = ctx.saved_tensors
        return (grads[0] @ w) * (1.5 - h.square() / 1.5), grads[0].flatten(0, -2).t() @ h.flatten(0, -2)


class CustomInside(CustomProduct):
    def forward(self, x: Tensor) -> Tensor:
        return _sum(self.down(InsideLinear.apply(self.embed(x), self.up.weight)))


class CustomOnParameters(CustomProduct):
    """The function's first argument depends on parameters only: it is open whose its gradient is, until the function uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return _sum(x + self.down(InsideLinear.apply(self.table, self.up.weight)))


def test_a_reduction_that_the_inside_of_a_custom_function_needs_in_backward_is_refused():
    plan = plan_of({"x": numbers(3, 4)}, mp.Rule("up", params={"weight": {"tp": mp.S(0)}}), PAIR[1])
    refused(CustomInside, plan, "custom-function")


def test_a_custom_function_may_use_a_parameter_in_a_way_of_each_rank():
    plan = plan_of({"x": numbers(3, 4)}, mp.Rule("up", params={"weight": {"tp": mp.S(0)}}), PAIR[1])
    exact(CustomOnParameters, plan)


class Reads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.how = nn.Linear(4, 6), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        match self.how:
            case "item":
                h = h * h.abs().max().item()
            case "branch":
                if h.sum() > 0:
                    h = -h
            case "list":
                h = h[: x.argmax(0).tolist()[0] + 1]
            case "nonzero":
                h = h[torch.nonzero(h[:, 0] > 0).flatten()]
        return _sum(h)


@pytest.mark.parametrize("how", ["item", "branch", "list", "nonzero"])
def test_a_program_that_depends_on_data_is_refused(how):
    error = refused(partial(Reads, how), plan_of({"x": numbers(3, 4)}, mp.Rule("up", use="colwise")), "host-read")
    assert error.where.file == __file__ and error.where.line
