"""Hooks: on gradients refused, since a rank has a part of one; around forwards exact, or refused where shards are not enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused
from tests.faults.test_uneven import PAIR, Mlp

pytestmark = pytest.mark.usefixtures("pool")

TP = plan_of({"x": numbers(4, 8)}, *PAIR)
DP = plan_of({"x": numbers(4, 8, dp=mp.S(0))}, mesh={"dp_shard": 2})
FSDP = plan_of({"x": numbers(4, 8, dp=mp.S(0))}, mesh={"dp_shard": 2}, fsdp=mp.Fsdp(units=["up", "down"]))
PLANS = {"tp": TP, "dp": DP, "fsdp": FSDP}


def unit(grad: Tensor) -> Tensor:
    return grad / grad.norm()


def clamp(p: Tensor) -> None:
    p.grad = p.grad.clamp(-0.1, 0.1)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "full backward": lambda m: m.up.register_full_backward_hook(lambda _, grads, __: grads),
    "full backward pre": lambda m: m.down.register_full_backward_pre_hook(lambda _, grads: (unit(grads[0]),)),
    "parameter": lambda m: m.down.bias.register_hook(unit),
    "post accumulate": lambda m: m.down.bias.register_post_accumulate_grad_hook(clamp),
}


def hooked(name: str) -> nn.Module:
    model = Mlp(6)
    HOOKS[name](model)
    return model


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_a_gradient_is_refused(name, plan):
    # Handed a shard, a summand, or (on a parameter, which lowering replaces) nothing at all.
    error = refused(partial(hooked, name), plan, "gradient-hook")
    assert error.module in ("up", "down")


def test_without_ranks_there_is_nothing_to_refuse():
    mp.lower(hooked("full backward"), plan_of({"x": numbers(4, 8)}, mesh={"tp": 1}), 1)


class TensorHook(Mlp):
    """A hook on the split activation, or on the whole result."""

    def __init__(self, whole: bool) -> None:
        super().__init__(6)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        y = self.down(h)
        (y if self.whole else h).register_hook(unit)
        return y.square().sum()


def test_a_hook_on_a_split_activation_is_refused_with_its_line():
    for plan in (TP, DP):
        error = refused(partial(TensorHook, False), plan, "gradient-hook")
        assert error.where.file == __file__ and error.where.line


def test_a_hook_on_a_whole_activation_is_exact():
    exact(partial(TensorHook, True), TP)


def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2 + 1


def normalised(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out / out.pow(2).sum()


def shifted(module: nn.Module, args: Any) -> Any:
    return (args[0] - 0.5,)


def with_forward_hook(where: str, hook: Callable[..., Any], pre: bool = False) -> nn.Module:
    model = Mlp(6)
    module = model.get_submodule(where)
    module.register_forward_pre_hook(hook) if pre else module.register_forward_hook(hook)
    return model


@pytest.mark.parametrize("plan", [TP, DP], ids=["tp", "dp"])
@pytest.mark.parametrize("where", ["up", "down", ""])
def test_a_forward_hook_that_is_right_on_shards_is_exact(where, plan):
    # After `down` the hook adds 1 to the sum of the partial results, not to each of them.
    exact(partial(with_forward_hook, where, doubled), plan)


@pytest.mark.parametrize("plan", [TP, DP], ids=["tp", "dp"])
def test_a_forward_pre_hook_that_is_right_on_shards_is_exact(plan):
    exact(partial(with_forward_hook, "down", shifted, True), plan)


@pytest.mark.parametrize("plan", [TP, DP], ids=["tp", "dp"])
def test_a_forward_hook_that_would_need_a_redistribution_is_refused(plan):
    error = refused(partial(with_forward_hook, "up", normalised), plan, "forward-hook")
    assert error.where.file == __file__ and error.where.line


class Counted(nn.Module):
    """Edits of the caller's own calls behind a child that has a hook: the hook's calls are not the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.up.register_forward_pre_hook(lambda _, args: (args[0].square().mul(0.5),))
        self.up.register_forward_hook(doubled)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.view(2, 2, 6).square().mul(h.mean()).view(4, 6)).square().sum()


@pytest.mark.parametrize("plan", [TP, DP], ids=["tp", "dp"])
def test_calls_of_a_childs_hooks_are_not_counted_as_the_callers(plan):
    exact(Counted, plan)
