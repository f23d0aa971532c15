"""Masks given as tensors: those of position and document are told from their values, the others stay, and all are exact."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshplan.mesh.build import Groups
from meshplan.ops.attention import block as plain
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.mask import Mask
from meshplan.ops.attention.recognise import by_position
from meshplan.ops.attention.sequence import Sequence
from tests.ops.attention.reference import TOLD, Case, check, simulated, spec_of, visible

SIZE = 24
METHODS = {"ring": None, "allgather": None, "ulysses": None, "hybrid": 2}


def told(seen: Tensor, order: Sequence, rank: int) -> Mask:
    """What becomes of the rows that a rank has of `seen` [B, 1, S, S]."""
    mine = order.cut(seen, 2, rank)
    return by_position(Mask(bias=mine), order.runs(rank), seen.shape[0])


def dense(mask: Mask, order: Sequence, rank: int, size: int) -> Tensor:
    """Boolean [B or 1, 1, rows, S] of a mask without a tensor, from the definition of its attributes."""
    at, to = order.positions(rank).unsqueeze(1), torch.arange(size)
    seen = ((to >= at - mask.left) & (to <= at + mask.right)).expand(1, 1, -1, -1)
    if mask.docs is None:
        return seen
    ids = mask.docs[:, None]
    return seen & (ids[..., order.positions(rank), None] == ids[..., None, :]) & (ids[..., None, :] >= 0)


def same(mask: Mask, seen: Tensor, order: Sequence, rank: int) -> bool:
    found = dense(mask, order, rank, seen.shape[3])
    return torch.equal(found.expand(seen.shape[0], -1, -1, -1), order.cut(seen, 2, rank))


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", TOLD[:2] + TOLD[3:])
def test_position_and_document_are_told(kind, balance):
    order, seen = Sequence(SIZE, 4, balance), visible(Case(kind, size=SIZE))
    for rank in range(4):
        mask = told(seen, order, rank)
        assert mask.bias is None and same(mask, seen, order, rank)


def test_a_window_is_no_wider_than_it_is():
    mask = told(visible(Case("window", size=SIZE)), Sequence(SIZE, 2, "zigzag"), 0)
    assert (mask.left, mask.right, mask.docs) == (4, 0, None)


def test_documents_that_see_back_and_forth_under_a_window():
    at = torch.arange(SIZE)
    ids = (at >= 9).long() + (at >= 14).long()
    seen = (ids[:, None] == ids) & ((at[:, None] - at).abs() <= 6)
    mask = told(seen.expand(2, 1, -1, -1), Sequence(SIZE, 1), 0)
    assert (mask.left, mask.right) == (6, 6)
    assert mask.docs is not None and mask.docs.tolist() == [ids.tolist()] * 2


def changed(row: int, column: int) -> Tensor:
    seen = visible(Case("causal", size=SIZE)).clone()
    seen[0, 0, row, column] ^= True
    return seen


OTHERS = {
    "random": visible(Case("bool", size=SIZE)),
    "padding": visible(Case("documents", size=SIZE)),  # rows that see nothing
    "a hole": changed(20, 3),
    "one too many": changed(4, 9),
    "by head": torch.stack([visible(Case("causal", size=SIZE))[0, 0], visible(Case("window", size=SIZE))[0, 0]])[None],
    "strictly before": torch.arange(SIZE)[:, None] > torch.arange(SIZE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_stays_a_tensor(name):
    seen = OTHERS[name].expand(2, -1, -1, -1) if OTHERS[name].dim() == 4 else OTHERS[name].expand(2, 1, -1, -1)
    assert told(seen, Sequence(SIZE, 1), 0).bias is not None


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_told_is_what_was_given(data):
    """Stretches of any kind, mostly of no kind: never told as something else."""
    size, balance = data.draw(st.sampled_from([8, 16])), data.draw(st.sampled_from(["zigzag", "contiguous"]))
    left, right = data.draw(st.integers(0, size)), data.draw(st.integers(0, 3))
    cuts = torch.tensor(sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3))))
    at = torch.arange(size)
    ids = torch.searchsorted(cuts, at, right=True)
    seen = (at >= at[:, None] - left) & (at <= at[:, None] + right) & (ids == ids[:, None])
    regular = True
    for _ in range(data.draw(st.integers(0, 2))):
        row, column = (data.draw(st.integers(0, size - 1)) for _ in range(2))
        seen[row, column] ^= True
        regular = False
    seen, order = seen[None, None], Sequence(size, 2, balance)
    for rank in range(2):
        mask = told(seen, order, rank)
        assert mask.bias is not None or same(mask, seen, order, rank)
        assert mask.bias is None or not regular


@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_one_device(method):
    for kind, balance in itertools.product(TOLD, ("zigzag", "contiguous")):
        case = Case(f"tensor {kind}")
        check(case, simulated(case, 4, balance, METHODS[method], method=method), balance)


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_a_tensor_costs_no_more_pairs_than_the_same_by_position(method, kind):
    """Whole hops and halves that a rank does not see are left out: counted where blocks are computed."""

    def pairs(**told: Any) -> int:
        count = 0

        def forward(q: Tensor, k: Tensor, v: Tensor, span: plain.Span, *rest: Any, **extras: Any) -> None:
            nonlocal count
            first, stop = span.keys(q.shape[2], k.shape[2])
            count += q.shape[2] * (stop - first)

        counting = SimpleNamespace(new_state=plain.new_state, forward=forward, finish=plain.finish)
        group = Groups(spec_of(4), 2).group("cp")
        q = torch.zeros(1, 1, SIZE // 4, 2)
        context_attention(q, q, q, group=group, sequence=order, method=method, block=counting, **told)
        return count

    order = Sequence(SIZE, 4, "zigzag")
    position = {"right": 0} if kind == "causal" else {"left": 4, "right": 0}
    mine = order.cut(visible(Case(kind, size=SIZE))[:1], 2, 2)
    assert 0 < pairs(attn_mask=mine) == pairs(**position) < pairs()
