"""Slots sorted by expert, and the tables by which rows are gathered forward and backward."""

from __future__ import annotations

import pytest
import torch

from meshplan.ops.experts import routing
from meshplan.ops.experts.routing import collect, combine, expand, pairs_of, regroup, sorted_slots

INDICES = torch.tensor([[2, 0], [0, -1], [2, 1]])  # the docstring's


def test_slots_are_sorted_by_expert_and_then_by_token():
    slots, counts = sorted_slots(INDICES, 3)
    pairs = pairs_of(slots, 5, 2)
    assert counts.tolist() == [2, 1, 2]
    assert pairs.slots.tolist() == [1, 2, 5, 0, 4]
    assert pairs.rows.tolist() == [0, 1, 2, 0, 2]
    assert pairs.place.tolist() == [[3, 0], [1, 5], [4, 2]] and not pairs.whole


def test_keys_outside_are_nobodys():
    slots, counts = sorted_slots(torch.tensor([[4, -3], [1, 2]]), 2)
    assert counts.tolist() == [0, 1] and slots[0] == 2
    slots, counts = sorted_slots(torch.empty(0, 3, dtype=torch.int64), 2)
    assert counts.tolist() == [0, 0] and pairs_of(slots, 0, 3).place.shape == (0, 3)


def test_blocks_by_source_become_blocks_by_expert():
    counts = torch.tensor([[1, 2], [0, 3], [2, 0]])  # three sources, two experts
    label = [(s, e) for s in range(3) for e in range(2) for _ in range(counts[s, e])]
    there, back = regroup(counts, 8)
    assert [label[i] for i in there.rows.tolist()] == sorted(label, key=lambda block: (block[1], block[0]))
    x = torch.randn(8, 2)
    assert torch.equal(expand(expand(x, there), back), x)
    there, _ = regroup(torch.zeros(3, 2, dtype=torch.int64), 0)
    assert expand(torch.empty(0, 2), there).shape == (0, 2)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_gradients_are_those_of_autograd(one_by_one, monkeypatch):
    """Either way to sum: that of the CPU, and that of devices whose `index_add_` uses atomics."""
    monkeypatch.setattr(routing, "_pair_by_pair", lambda y: one_by_one)
    slots, counts = sorted_slots(INDICES, 3)
    pairs = pairs_of(slots, int(counts.sum()), 2)
    x, y = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: expand(x, pairs), x)
    assert torch.autograd.gradcheck(lambda y: collect(y, pairs), y)
    assert torch.autograd.gradcheck(lambda y, w: combine(y, w, pairs), (y, w))


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("k", [1, 3])
def test_sums_are_those_of_the_dense_matrix(k, one_by_one, monkeypatch):
    monkeypatch.setattr(routing, "_pair_by_pair", lambda y: one_by_one)
    draw = torch.Generator().manual_seed(k)
    indices = torch.randint(-2, 5, (7, k), generator=draw)
    slots, counts = sorted_slots(indices, 5)
    pairs = pairs_of(slots, int(counts.sum()), k)
    y = torch.randn(pairs.rows.shape[0], 4, generator=draw, dtype=torch.float64)
    w = torch.randn(7, k, generator=draw, dtype=torch.float64)
    dense = torch.nn.functional.one_hot(pairs.rows, 7).double().T
    torch.testing.assert_close(collect(y, pairs), dense @ y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        combine(y, w, pairs), dense @ (w.flatten()[pairs.slots, None] * y), rtol=1e-12, atol=1e-12
    )
    nothing = pairs_of(slots, 0, k)
    assert not collect(y[:0], nothing).any() and not combine(y[:0], w, nothing).any()


def test_a_slot_without_an_expert_adds_nothing():
    out = combine(torch.ones(5, 1), torch.ones(3, 2), pairs_of(sorted_slots(INDICES, 3)[0], 5, 2))
    assert out.flatten().tolist() == [2.0, 1.0, 2.0]


def test_half_precision_is_summed_in_float32():
    k = 8
    pairs = pairs_of(sorted_slots(torch.arange(k)[None], k)[0], k, k)
    y = torch.full((k, 1), 2.0**-9, dtype=torch.bfloat16)
    y[0] = 1.0
    assert collect(y, pairs).item() == 1.015625  # 1 + 7/512, rounded once; one by one it would stay 1
    assert combine(y, torch.ones(1, k), pairs).item() == 1.015625
