"""Replicated parameters used inside a split region: their gradient is the sum over ranks, once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")


class HeadNorm(nn.Module):
    """An RMSNorm weight of one head, applied to each of the split heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.q_norm, self.o = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q_norm(self.q(x).view(*x.shape[:-1], 4, 4))
        return self.o(y.flatten(-2)).pow(3).sum()


class Gain(nn.Module):
    """A vector and a 0-dim number that multiply a split activation in a module of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.gain, self.shift = nn.Parameter(torch.ones(10)), nn.Parameter(torch.zeros(10))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) * self.gain + self.shift
        return self.down(y * self.scale).square().sum()


class TwoRegions(nn.Module):
    """One norm used on a split activation and on a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).view(*x.shape[:-1], 2, 4)
        return self.down(self.norm(y).flatten(-2)).square().sum()


class Router(nn.Module):
    """A whole gate that weighs two branches, each of them split."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.up, self.down = (nn.ModuleList(nn.Linear(*d) for _ in range(2)) for d in ((6, 4), (4, 6)))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        parts = [
            down(torch.relu(up(x)) * weights[..., i : i + 1])
            for i, (up, down) in enumerate(zip(self.up, self.down, strict=True))
        ]
        return sum(parts).square().sum()


PAIR = (mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))


def test_a_norm_of_one_head_over_split_heads():
    # NeMo-RL#3716, torchtitan#2532: a rank's own gradient is a part of it only.
    exact(HeadNorm, plan_of({"x": numbers(3, 5, 8)}, mp.Rule("q", use="colwise"), mp.Rule("o", use="rowwise")))


def test_a_norm_of_one_head_stays_equal_on_all_ranks_over_three_steps():
    # TransformerEngine#441: replicas are compared bit for bit.
    rules = (mp.Rule("q", use="colwise"), mp.Rule("o", use="rowwise"))
    exact(HeadNorm, plan_of({"x": numbers(4, 5, 8, dp=mp.S(0))}, *rules, mesh={"dp_replicate": 2, "tp": 2}), 4, steps=3)


def test_vectors_and_numbers_that_multiply_a_split_activation():
    exact(Gain, plan_of({"x": numbers(3, 6)}, *PAIR))


def test_one_module_used_in_a_split_region_and_in_a_whole_one():
    # Its gradient is a part of the whole from one use and the whole from the other.
    exact(TwoRegions, plan_of({"x": numbers(3, 4)}, *PAIR))


def test_a_whole_router_that_weighs_split_branches():
    rules = (mp.Rule("up.*", use="colwise"), mp.Rule("down.*", use="rowwise"))
    exact(Router, plan_of({"x": numbers(3, 6)}, *rules))
