"""Weights read where nobody expects it: by a parent, through an expression, in a penalty, by a container of torch's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Reads(nn.Module):
    """A parent that uses its children's weights itself, in one of several ways."""

    def __init__(self, how: str, hidden: int = 6) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(4, hidden, bias=False), nn.Linear(hidden, 4), how

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up.weight, self.down.weight
        match self.how:
            case "linear":
                h = F.linear(x, up)
            case "product":
                return (x @ (down @ up).t()).square().sum()
            case "transposed":
                h = x @ up.t()
            case "normalised rows":
                h = F.linear(x, up / up.norm(dim=1, keepdim=True))
            case "rounded":
                scale = up.abs().mean()
                h = F.linear(x, up + ((up / scale).round() * scale - up).detach())
            case "both":
                h = self.up(x) + 0.5 * F.linear(x, up)
            case "columns":
                h = F.linear(x, up)[..., : up.shape[0] // 2].repeat(1, 1, 2)
        return self.down(torch.tanh(h)).pow(3).sum()


PAIR = (mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))
WAYS = ["linear", "product", "transposed", "normalised rows", "rounded", "both", "columns"]


@pytest.mark.parametrize("how", WAYS)
def test_a_split_weight_that_the_parent_reads(how):
    exact(partial(Reads, how), plan_of({"x": numbers(4, 5, 4)}, *PAIR))


@pytest.mark.parametrize("units", [["up", "down"], [""], ["down"]], ids=str)
@pytest.mark.parametrize("how", ["linear", "both"])
def test_a_weight_of_a_unit_that_the_parent_reads(how, units):
    # axolotl#2992: read outside its own unit's forward, a parameter is still sharded.
    x = {"x": numbers(4, 5, 4, dp=mp.S(0))}
    plan = plan_of(x, mesh={"dp_shard": 2}, fsdp=mp.Fsdp(units=units))
    if "up" in units:
        error = refused(partial(Reads, how), plan, "foreign-unit")
        assert error.module == "" and "up.weight" in error.message and error.where.line
    else:
        exact(partial(Reads, how), plan)


class Penalty(nn.Module):
    """A loss with a term of the parameters alone: whole on every data rank, and counted once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(4, 6), nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        loss = self.down(torch.tanh(self.up(x))).square().mean()
        if self.how == "own":
            return loss
        penalty = self.up.weight.square().sum() if self.how == "split" else self.down.bias.square().sum()
        return loss + 0.1 * penalty


@pytest.mark.parametrize("how", ["split", "whole"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_a_penalty_on_parameters_is_counted_once(how, mesh):
    plan = plan_of({"x": numbers(4, 5, 4, dp=mp.S(0))}, *(PAIR if "tp" in mesh else ()), mesh=mesh)
    exact(partial(Penalty, how), plan)


@pytest.mark.parametrize("units", [["up"], ["down"]], ids=str)
def test_a_penalty_on_the_parameters_of_a_unit(units):
    x = {"x": numbers(4, 5, 4, dp=mp.S(0))}
    plan = plan_of(x, mesh={"dp_shard": 2}, fsdp=mp.Fsdp(units=units))
    if units == ["up"]:
        refused(partial(Penalty, "split"), plan, "foreign-unit")
    else:
        exact(partial(Penalty, "split"), plan)


class Own(nn.Module):
    """A module of torch that keeps its projections' weights itself."""

    def __init__(self, make: str) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.inner = {
            "attention": lambda: nn.MultiheadAttention(8, 4, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(8, 4, 12, 0.0, batch_first=True),
            "lstm": lambda: nn.LSTM(8, 6, batch_first=True),
            "gru": lambda: nn.GRU(8, 6, batch_first=True, bidirectional=True),
            "bilinear": lambda: nn.Bilinear(8, 8, 5),
            "prelu": lambda: nn.Sequential(nn.Linear(8, 6), nn.PReLU(5)),
        }[make]()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        match self.make:
            case "attention":
                h = self.inner(h, h, h, need_weights=False)[0]
            case "lstm" | "gru":
                h = self.inner(h)[0]
            case "bilinear":
                h = self.inner(h, h)
            case _:
                h = self.inner(h)
        return h.pow(3).sum()


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}])
@pytest.mark.parametrize("make", ["attention", "encoder", "lstm", "gru", "bilinear", "prelu"])
def test_modules_of_torchs_own(make, mesh):
    rules = [mp.Rule("embed", use="colwise")] if "tp" in mesh else []
    plan = plan_of({"x": numbers(4, 5, 4, dp=mp.S(0))}, *rules, mesh=mesh)
    if make in ("lstm", "gru") and "tp" in mesh:
        # Recurrent layers look at the size of their input before anything is computed: the plan must say that it is whole.
        error = refused(lambda: Own(make).double(), plan, "diverged")
        assert error.module == "inner" and "Expected 8, got 4" in error.message
        whole = mp.Rule("inner", input={"input": {"tp": mp.R}})
        exact(partial(Own, make), plan_of({"x": numbers(4, 5, 4)}, *rules, whole))
        return
    exact(partial(Own, make), plan)
