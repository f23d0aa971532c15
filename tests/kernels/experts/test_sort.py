"""The counting sort of slots: bit for bit what the plain operator gives, in the order of slots, of any shape and skew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.errors import PlanError
from meshplan.kernels.experts import sort
from meshplan.ops.experts import routing
from tests.kernels.interpreted import interpreted


def check(keys: torch.Tensor, experts: int) -> None:
    found, n = sort.sort(keys, experts), int(((keys >= 0) & (keys < experts)).sum())
    slots, counts = routing.sorted_slots(keys, experts)
    assert torch.equal(found.slots, slots) and torch.equal(found.counts, counts)
    assert found.starts.tolist() == [0, *counts.cumsum(0).tolist()] and found.starts.dtype == torch.int32
    want, got = routing.pairs_of(slots, n, keys.shape[1]), sort.pairs_of(found.slots, n, keys.shape[1])
    for name in ("rows", "slots", "place"):
        one, other = getattr(got, name), getattr(want, name)
        assert torch.equal(one, other) and one.dtype == other.dtype, name
    assert got.whole == want.whole and torch.equal(found.place.view(want.place.shape), want.place)


@interpreted
def test_the_example_of_the_operator():
    keys = torch.tensor([[2, 0], [0, -1], [2, 1]])
    found = sort.sort(keys, 3)
    assert found.slots.tolist() == [1, 2, 5, 0, 4, 3] and found.starts.tolist() == [0, 2, 3, 5]
    assert found.place.tolist() == [3, 0, 1, 5, 4, 2]


@interpreted
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_drawn_keys_are_sorted_as_the_operator_sorts_them(data):
    experts = data.draw(st.sampled_from([1, 2, 3, 8, 14, 15, 61]), "experts")
    shape = data.draw(st.integers(0, 30), "rows"), data.draw(st.integers(1, 8), "k")
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    keys = torch.randint(-2, experts + 2, shape, generator=draw)
    skew = data.draw(st.sampled_from(["none", "one", "half"]), "skew")
    if skew == "one":
        keys[:] = experts - 1
    elif skew == "half":
        keys = keys % max(1, experts // 2)
    check(keys.to(data.draw(st.sampled_from([torch.int64, torch.int32]), "dtype")), experts)


@interpreted
def test_more_blocks_of_slots_than_are_scanned_at_a_time():
    draw = torch.Generator().manual_seed(1)
    check(torch.randint(-1, 5, (260, 4), generator=draw), 5)  # 65 blocks of 16


@interpreted
def test_keys_that_no_32_bits_hold_are_nobodys():
    check(torch.tensor([[2**32 + 1, 0], [1, -(2**40)]]), 2)


def test_cpu_tensors_outside_the_interpreter_are_refused():
    with pytest.raises(PlanError, match="CPU tensors") as caught:
        sort.sort(torch.zeros(2, 2, dtype=torch.int64), 3)
    assert caught.value.code == "experts-kernel"
    with pytest.raises(PlanError):
        sort.pairs_of(torch.zeros(4, dtype=torch.int64), 4, 2)
