"""Biases added to partial sums: each enters the reduced sum once, and every replica has one device's gradient of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")


class Row(nn.Module):
    """x = [1, 1], W = [[1], [1]], b = 10: y is 12, and its derivative by b is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(2, 1)
        nn.init.ones_(self.o.weight)
        nn.init.constant_(self.o.bias, 10.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x)


class TwoBranches(nn.Module):
    """Two row-split branches, each with a bias of its own, added before anything else uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return (self.a(h) + self.b(h) + x).pow(3).sum()


class OwnBias(nn.Module):
    """A bias that the model adds itself to the result of a row split, and a number added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6, bias=False)
        self.bias = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(torch.tanh(self.up(x)), self.down.weight)
        return torch.sigmoid(y + self.bias + 10.0).sum()


PAIR = (mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))


def row_split_on_a_rank() -> tuple[float, float]:
    plan = mp.Plan(mesh={"tp": 2}, inputs={"x": mp.Input(shape=(1, 2))}, rules=[mp.Rule("o", use="rowwise")])
    model = mp.parallelize(Row(), plan)
    y = model(torch.ones(1, 2))
    y.sum().backward()
    return y.item(), model.o.bias.grad.full_tensor().item()


def test_the_bias_of_a_row_split_linear_is_added_once(pool):
    assert pool.run(row_split_on_a_rank, world=2) == [(12.0, 1.0), (12.0, 1.0)]


def test_two_row_split_branches_with_biases_of_their_own():
    rules = (mp.Rule("up", use="colwise"), mp.Rule("{a,b}", use="rowwise"))
    exact(TwoBranches, plan_of({"x": numbers(3, 6)}, *rules))


def test_two_branches_that_stay_partial_until_they_are_added():
    partial = {"output": {"tp": mp.P}}
    rules = (mp.Rule("up", use="colwise"), mp.Rule("{a,b}", use="rowwise", **partial))
    exact(TwoBranches, plan_of({"x": numbers(3, 6)}, *rules))


def test_a_bias_and_a_number_added_by_the_model_itself():
    exact(OwnBias, plan_of({"x": numbers(3, 6)}, *PAIR))
