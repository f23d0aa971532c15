"""The single-device program as a list of calls: what is recorded, what is computed for real, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan import compat
from meshplan.compiler.capture import Trace, capture
from meshplan.compiler.skeleton import fake_copy, fake_world
from meshplan.errors import PlanError
from meshplan.verify.aligned import align

SOURCE = Path(__file__).read_text().splitlines()


def traced(model: nn.Module, **shapes: tuple[int, ...]) -> Trace:
    with fake_world() as mode:
        with mode:
            inputs = {name: torch.empty(shape) for name, shape in shapes.items()}
        return capture(lambda: fake_copy(model, mode), mode, inputs)[1]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.up(x)
        positions = torch.arange(y.shape[1])
        if (positions >= 0).all():  # a constant: read for real, as in a real run
            y = y + positions
        return y[:, :3].sum()


def test_calls_in_order_with_their_modules_and_lines():
    trace = traced(Counts(), x=(5, 4))
    assert [(c.module, c.name) for c in trace.calls] == [
        ("up", "linear"),
        ("", "arange"),
        ("", "ge"),
        ("", "all"),
        ("", "add"),
        ("", "__getitem__"),
        ("", "sum"),
    ]
    assert trace.reads == [("__bool__", True)]
    where = trace.calls[4].where
    assert where is not None and where.file == __file__ and "y + positions" in SOURCE[where.line - 1]
    assert [c.ordinal for c in trace.calls if c.module == ""] == [0, 1, 2, 3, 4, 5]


def test_the_users_model_and_generator_are_untouched():
    model = Counts()
    before = torch.random.get_rng_state()
    weight = model.up.weight.detach().clone()
    traced(model, x=(5, 4))
    assert model.calls == 0 and not model._forward_pre_hooks and not model.up._forward_hooks
    assert torch.equal(torch.random.get_rng_state(), before) and torch.equal(model.up.weight, weight)


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.max().item() > 0 else x


def test_reading_data_on_the_host_is_refused_with_the_line():
    with pytest.raises(PlanError) as refused:
        traced(Reads(), x=(3,))
    error = refused.value
    assert error.code == "host-read" and error.where is not None and error.where.file == __file__
    assert "x.max().item()" in SOURCE[error.where.line - 1]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y += 2
        return y * y


def test_writing_in_place_makes_a_new_value():
    trace = traced(InPlace(), x=(2,))
    first, second, third = trace.calls
    assert second.in_place and second.ins == first.outs and second.outs != first.outs
    assert third.ins == second.outs * 2


def test_a_default_device_of_the_caller_does_not_reach_the_trace():
    with torch.device("meta"):
        model = Counts()
        trace = traced(model, x=(5, 4))
        assert torch.empty(1).is_meta  # and it is there again afterwards
    assert {t.device.type for t in trace.values} == {"cpu"}


class Filled(nn.Module):
    """Writes what it was handed into what it made."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(x.shape, dtype=x.dtype)
        made += x
        rows = torch.zeros(x.shape).double()
        rows[:, 0] = x[:, 0]
        return made.sum() + rows.sum()


def test_what_is_written_into_is_no_constant():
    # Its zeros, summed, were the same number everywhere, so that the sum of a shard was taken for the whole sum.
    trace = traced(Filled(), x=(4, 3))
    made = [trace.values[v] for c in trace.calls if c.name in ("sum", "zeros", "double") for v in c.outs]
    assert [compat.is_fake(t) for t in made] == [True, False, True, True, True]
    plan = mp.Plan(mesh={"dp_shard": 2}, inputs={"x": mp.Input((4, 3), torch.float64, {"dp": mp.S(0)})})
    align(Filled(), plan, 2)
