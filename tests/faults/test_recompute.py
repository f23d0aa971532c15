"""Recompute: the same layouts, masks and uses as in the forward, for one call and for several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Pairs(nn.Module):
    """The same blocks on two inputs, with one loss of both: two forwards before one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            y = layer(y)
        return (x * y).sum()


class Used(nn.Module):
    """A unit called again on its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.first = Block(), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.block(self.block(self.first(x)) + y).square().sum()


TP = (mp.Rule("**.up", use="colwise"), mp.Rule("**.down", use="rowwise"))


def inputs(**place: mp.S) -> dict[str, mp.Input]:
    return {"x": numbers(4, 3, 6, **place), "y": numbers(4, 3, 6, **place)}


def test_two_forwards_before_one_backward_under_tp():
    # pytorch#153354, torchtune#2451.
    exact(Pairs, plan_of(inputs(), *TP, recompute=mp.Recompute(units=["layers.*"])), steps=2)


def test_two_forwards_before_one_backward_under_fsdp():
    sections = {"fsdp": mp.Fsdp(units=["layers.*"]), "recompute": mp.Recompute(units=["layers.*"])}
    plan = plan_of(inputs(dp=mp.S(0)), mesh={"dp_shard": 2}, **sections)
    exact(Pairs, plan, steps=2)


def test_a_unit_called_on_its_own_result():
    exact(Used, plan_of(inputs(), *TP, recompute=mp.Recompute(units=["block"])))


class Routed(nn.Module):
    """Each token goes to the best of 3 experts, with ties, and is weighed by its score."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3, bias=False)
        self.up, self.down = (nn.ModuleList(nn.Linear(*d) for _ in range(3)) for d in ((6, 4), (4, 6)))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x.round()).softmax(-1)
        weight, best = scores.max(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            out = out + torch.where(best == i, weight * down(torch.relu(up(x))), 0.0)
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}])
def test_routing_is_the_same_when_it_is_computed_again(mesh):
    # NeMo-RL#1203: the recompute routed otherwise and saved another number of tensors.
    sections: dict[str, Any] = {"recompute": mp.Recompute(units=["layers.*"])}
    if "dp_shard" in mesh:
        sections["fsdp"] = mp.Fsdp(units=["layers.*"])
    rules = (mp.Rule("**.up.*", use="colwise"), mp.Rule("**.down.*", use="rowwise")) if "tp" in mesh else ()
    exact(Experts, plan_of({"x": numbers(4, 3, 6, dp=mp.S(0))}, *rules, mesh=mesh, **sections), steps=2)
