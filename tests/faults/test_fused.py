"""Fused projections: each part is split on its own, and the user's row order survives gathering and saving."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class FusedQkv(nn.Module):
    """4 heads of 2 from one Linear(8 -> 24), taken apart by `chunk(3)`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], -1, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2)).square().sum()


class Grouped(nn.Module):
    """Grouped-query parts of unequal sizes: 4 heads of 2, and 2 kv heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], -1, 2).transpose(1, 2) for t in self.qkv(x).split([8, 4, 4], -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2)).square().sum()


class GateUp(nn.Module):
    """gate | up stored one after the other, or interleaved row by row."""

    def __init__(self, hidden: int, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.gate_up, self.down = nn.Linear(8, 2 * hidden, bias=False), nn.Linear(hidden, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up(x)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.interleaved else y.chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up).square().sum()


class PairView(GateUp):
    """Interleaved pairs taken apart by a view to (hidden, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).view(*x.shape[:-1], -1, 2).unbind(-1)
        return self.down(nn.functional.silu(gate) * up).square().sum()


def parts(name: str, *sizes: int) -> mp.Rule:
    return mp.Rule(name, use="colwise", params={"weight": {"tp": mp.S(0, sizes)}})


X = {"x": numbers(3, 5, 8)}
DOWN, OUT = mp.Rule("down", use="rowwise"), mp.Rule("o", use="rowwise")


def rows_of_each_rank() -> tuple[list[int], bool]:
    """On a rank: which rows of the fused weight it holds, and whether the gathered weight is the user's."""
    model = FusedQkv()
    with torch.no_grad():
        model.qkv.weight.copy_(torch.arange(24.0).view(-1, 1).expand(24, 8))
    before = model.qkv.weight.detach().clone()
    weight = mp.parallelize(model, plan_of({"x": numbers(3, 5, 8)}, parts("qkv", 8, 8, 8), OUT)).qkv.weight
    return weight.to_local()[:, 0].int().tolist(), torch.equal(weight.full_tensor(), before)


def test_a_rank_holds_its_rows_of_every_part_and_gathering_restores_the_order(pool):
    first, second = pool.run(rows_of_each_rank, world=2)
    assert first == ([0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], True)
    assert second == ([4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23], True)


@pytest.mark.parametrize("rule", [mp.Rule("qkv", use="colwise"), parts("qkv", 8, 8, 8)])
def test_a_fused_projection_is_exact_with_and_without_declared_parts(rule):
    # Automodel#1324: an equal cut hands the ranks the wrong mix. Without parts the activation is gathered, and listed.
    exact(FusedQkv, plan_of(X, rule, OUT))


@pytest.mark.parametrize("rule", [mp.Rule("qkv", use="colwise"), parts("qkv", 8, 4, 4)])
def test_fused_parts_of_unequal_sizes(rule):
    exact(Grouped, plan_of(X, rule, OUT))


def test_declared_parts_need_no_redistribution_and_undeclared_ones_are_listed():
    declared = mp.lower(FusedQkv(), plan_of(X, parts("qkv", 8, 8, 8), OUT), 2).to_json()
    plain = mp.lower(FusedQkv(), plan_of(X, mp.Rule("qkv", use="colwise"), OUT), 2).to_json()
    assert not [b for b in declared["boundaries"] if b["implicit"] and b["side"] != "param"]
    assert [b for b in plain["boundaries"] if b["implicit"] and b["from"] == "S(2)"]


@pytest.mark.parametrize("model", [GateUp, partial(GateUp, interleaved=True), PairView])
@pytest.mark.parametrize("hidden", [3, 4])
def test_gate_and_up_under_a_plain_column_split(model, hidden):
    # torchtitan#4535: hidden 3 is stored as 6 rows, and 6 divides by 2 where 3 does not.
    exact(partial(model, hidden), plan_of(X, mp.Rule("gate_up", use="colwise"), DOWN))


def test_the_logical_size_of_a_part_is_tested_and_not_the_stored_one():
    error = refused(partial(GateUp, 3), plan_of(X, parts("gate_up", 3, 3), DOWN), "parts-not-divisible")
    assert "size 3" in error.message and "tp 2" in error.message and error.where.line


def test_parts_that_do_not_make_up_the_weight_are_refused():
    error = refused(partial(GateUp, 4), plan_of(X, parts("gate_up", 4, 3), DOWN), "bad-parts")
    assert "sum to 7" in error.message and error.where.line


@pytest.mark.parametrize(("ranks", "tp"), [(4, 1), (3, 1), (2, 2)])
def test_data_sharding_that_cuts_inside_a_fused_group(ranks, tp):
    # Automodel#1357: 16 rows of q | k | v over 3 or 4 ranks end in the middle of a part.
    mesh = {"dp_shard": ranks, "tp": tp}
    rules = (parts("qkv", 8, 4, 4), OUT) if tp > 1 else ()
    x = {"x": numbers(2 * ranks, 5, 8, dp=mp.S(0))}
    exact(Grouped, plan_of(x, *rules, mesh=mesh, fsdp=mp.Fsdp(units=["qkv", "o"])), ranks * tp, steps=2)
