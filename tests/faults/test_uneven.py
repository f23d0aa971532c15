"""Sizes that the axis does not divide: the true global size survives, or the plan is refused before a collective."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, ids, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Mlp(nn.Module):
    def __init__(self, hidden: int = 5, dim: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()


class Mean(nn.Module):
    """The mean over features that a column split leaves 3 to one rank and 2 to the other."""

    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(4, features)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return (y - y.mean(-1, keepdim=True)).pow(3).mean()


class Block(nn.Module):
    def __init__(self, rows: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.head = nn.Linear(8, rows)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


PAIR = (mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))


@pytest.mark.parametrize(("hidden", "ranks"), [(5, 2), (7, 4), (3, 4)])
def test_a_hidden_size_the_axis_does_not_divide_keeps_its_true_width(hidden, ranks):
    # pytorch#150336: 8 -> 5 -> 8. On 4 ranks 7 is 2, 2, 2, 1 and 3 leaves the last rank without any row.
    exact(partial(Mlp, hidden), plan_of({"x": numbers(3, 8)}, *PAIR, mesh={"tp": ranks}), ranks)


def test_a_mean_over_unequal_shards_weighs_every_element_once():
    exact(Mean, plan_of({"x": numbers(3, 4)}, mp.Rule("up", use="colwise")))


@pytest.mark.parametrize("length", [5, 3, 1])
def test_an_odd_sequence_under_sequence_parallelism(length):
    # torchtitan#1306 and #686: the global length must not be guessed from one shard.
    split = {"output": {"tp": mp.S(1)}}
    rules = (
        mp.Rule("embed", use="embedding", **split),
        mp.Rule("norm", use="sequence"),
        mp.Rule("up", use="colwise"),
        mp.Rule("down", use="rowwise", **split),
        mp.Rule("head", use="vocab_head"),
    )
    exact(Block, plan_of({"tokens": ids(2, length), "labels": ids(2, length)}, *rules))


def test_five_rows_over_four_ranks():
    exact(
        partial(Block, 5),
        plan_of({"tokens": ids(2, 4), "labels": ids(2, 4)}, mp.Rule("embed", use="embedding"), mesh={"tp": 4}),
        4,
    )


def test_a_first_dim_smaller_than_the_data_axis():
    # pytorch#137342: rows 2 on 4 ranks leave two ranks with nothing to hold.
    exact(
        partial(Mlp, 2),
        plan_of({"x": numbers(4, 8, dp=mp.S(0))}, mesh={"dp_shard": 4}, fsdp=mp.Fsdp(units=["up", "down"])),
        4,
    )


def test_a_batch_the_data_axis_does_not_divide_is_refused():
    error = refused(Mlp, plan_of({"x": numbers(5, 8, dp=mp.S(0))}, mesh={"dp_shard": 2}), "input-not-divisible")
    assert "size 5" in error.message and "dp 2" in error.message and error.where.line


@pytest.mark.parametrize("boundary", [{"tp": mp.S(-1)}, {"tp": mp.R}], ids=str)
def test_a_boundary_of_five_over_two_ranks_is_five_everywhere(boundary):
    # pytorch#110762: each rank took its own 3 or 2 for half of the whole, and so 6 or 4 for the whole.
    rules = (mp.Rule("up", use="colwise", output=boundary), mp.Rule("down", use="rowwise", input=boundary))
    low = mp.lower(Mlp().double(), plan_of({"x": numbers(3, 8)}, *rules), 2)
    assert {c.elements for c in low.collectives if c.op == "all_gather"} <= {3 * 6}  # 5, padded to 3 a rank
    exact(Mlp, plan_of({"x": numbers(3, 8)}, *rules))
