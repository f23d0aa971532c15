"""The two outcomes a plan may have: exact on real ranks, or refused with its place before anything is communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshplan as mp


def numbers(*shape: int, **place: Any) -> mp.Input:
    """A float64 input of this global shape."""
    return mp.Input(shape=shape, dtype=torch.float64, place=place)


def ids(*shape: int, **place: Any) -> mp.Input:
    """An int64 input of this global shape."""
    return mp.Input(shape=shape, dtype=torch.int64, place=place)


def plan_of(
    inputs: dict[str, mp.Input], *rules: mp.Rule, mesh: dict[str, int] | None = None, **sections: Any
) -> mp.Plan:
    """A plan on tp 2, or on `mesh`."""
    return mp.Plan(mesh=mesh or {"tp": 2}, inputs=inputs, rules=list(rules), **sections)


def exact(factory: Callable[[], nn.Module], plan: mp.Plan, ranks: int = 2, **options: Any) -> Any:
    """Loss, gradients, stepped parameters, replicas and collectives on `ranks` gloo ranks equal one device's, in float64."""
    receipt = mp.verify(factory, plan, nproc=ranks, **{"steps": 1, **options})
    assert receipt.passed, str(receipt)
    return receipt


def refused(
    factory: Callable[[], nn.Module], plan: mp.Plan, code: str, world: int = 2, inputs: Any = None
) -> mp.PlanError:
    """The error with which `lower`, which has no process group and so cannot communicate, refuses the plan."""
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(factory(), plan, world, inputs)
    assert caught.value.code == code, str(caught.value)
    return caught.value
