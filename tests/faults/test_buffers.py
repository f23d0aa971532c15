"""Buffers that no checkpoint holds: rebuilt when a model is made on meta, equal and finite on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")


class Rotary(nn.Module):
    """Frequencies 1 / 10^k that are not saved, beside a counter and a table that are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.register_buffer("frequencies", 1.0 / 10 ** torch.arange(3.0), persistent=False)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], dtype=self.frequencies.dtype), self.frequencies).repeat(1, 2)
        y = self.up(x)
        return self.down((y * angles.cos() + y.roll(1, 1) * angles.sin()) * self.scale + self.table).square().sum()


class Counting(nn.Module):
    """A buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.up(x).square().sum()


PLAN = plan_of({"x": numbers(2, 5, 8)}, mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))


def materialised() -> list[Tensor]:
    model = mp.parallelize(mp.meta(Rotary), PLAN)
    return [b.clone() for b in model.buffers()]


def test_unsaved_buffers_of_a_meta_model_are_rebuilt_on_every_rank(pool):
    # lmms-engine#185, SkyRL#1709: raw memory after `to_empty`, and only off rank 0.
    want = list(Rotary().buffers())
    for buffers in pool.run(materialised, world=2):
        assert all(torch.equal(a, b) for a, b in zip(buffers, want, strict=True))


def test_a_table_as_wide_as_a_split_activation_is_cut_with_it():
    exact(Rotary, PLAN)


def counted() -> int:
    model = mp.parallelize(Counting(), plan_of({"x": numbers(2, 5, 8)}, mp.Rule("up", use="colwise")))
    for _ in range(3):
        model(torch.ones(2, 5, 8))
    return int(model.calls)


def test_lowering_leaves_counters_alone(pool):
    # Three calls, and none for tracing, lowering or checking.
    assert pool.run(counted, world=2) == [3, 3]
    model = Counting()
    mp.lower(model, plan_of({"x": numbers(2, 5, 8)}, mp.Rule("up", use="colwise")), 2)
    assert model.calls == 0


def materialised_apart() -> tuple[str, list[Tensor]]:
    """Rank 0 builds the model for real, rank 1 on meta."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = Rotary() if dist.get_rank() == 0 else mp.meta(Rotary)
    try:
        model = mp.parallelize(model, PLAN)
    except mp.PlanError as error:
        return error.code, []
    return "", [b.clone() for b in model.buffers()]


def test_a_model_real_on_one_rank_and_on_meta_on_another_is_refused(pool):
    # SkyRL#1709: rank 0 had weights, the others raw memory.
    assert [code for code, _ in pool.run(materialised_apart, world=2)] == ["ranks-differ"] * 2
