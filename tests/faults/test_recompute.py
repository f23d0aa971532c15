"""Recompute: the same layouts, masks and uses as in the forward, for one call and for several."""

from __future__ import annotations

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
