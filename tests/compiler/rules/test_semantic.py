"""Whole torch functions and the operators that replace them: every layout they are run in holds by value."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.rules.held import accepted, f, ids, kinds_of, mask, wrong

T = torch.Tensor
CALLS: list[tuple[Any, ...]] = [
    (F.linear, f(3, 4, 5), f(6, 5), f(6)),
    (F.linear, f(3, 5), f(7, 5)),
    (F.linear, f(5), f(6, 5), f(6)),
    (torch.matmul, f(3, 4), f(4, 5)),
    (torch.matmul, f(2, 3, 4), f(4, 5)),
    (torch.matmul, f(2, 3, 4), f(2, 4, 5)),
    (torch.matmul, f(1, 3, 4), f(6, 4, 5)),
    (torch.matmul, f(4), f(4)),
    (torch.matmul, f(3, 4), f(4)),
    (torch.matmul, f(4), f(4, 5)),
    (torch.matmul, f(4), f(2, 4, 5)),
    (torch.matmul, f(2, 3, 4), f(4)),
    (torch.bmm, f(2, 3, 4), f(2, 4, 5)),
    (torch.mm, f(3, 4), f(4, 5)),
    (torch.mv, f(3, 4), f(4)),
    (torch.dot, f(5), f(5)),
    (T.__rmatmul__, f(4, 5), f(3, 4)),
    (torch.einsum, "bij,bjk->bik", f(2, 3, 4), f(2, 4, 5)),
    (torch.einsum, "ij,kj->ik", f(3, 4), f(5, 4)),
    (torch.einsum, "i,j->ij", f(3), f(4)),
    (torch.einsum, "ij->j", f(3, 4)),
    (torch.einsum, "bi,bi", f(3, 4), f(3, 4)),
    (F.scaled_dot_product_attention, f(2, 6, 3, 5), f(2, 6, 3, 5), f(2, 6, 3, 5)),
    (F.scaled_dot_product_attention, f(3, 4, 3, 5), f(3, 4, 6, 5), f(3, 4, 6, 5), mask(3, 1, 3, 6)),
    (F.layer_norm, f(3, 4, 5), (5,), f(5), f(5)),
    (F.layer_norm, f(3, 4, 5), (4, 5)),
    (F.rms_norm, f(3, 4, 6), (6,), f(6)),
    (F.rms_norm, f(3, 7), (7,)),
    (F.embedding, ids(3, 4), f(7, 5)),
    (F.embedding, ids(3, 4), f(7, 5), 2),
    (F.cross_entropy, f(6, 7), ids(6)),
    (F.cross_entropy, f(5, 7, 4), ids(5, 4)),
    (F.cross_entropy, f(7), ids()),
    (F.pad, f(3, 4, 5), (1, 0)),
    (F.pad, f(3, 4, 5), (0, 0, 1, 1), "constant", 1.0),
    (F.pad, f(5, 6, 5), (1, 1), "reflect"),
    (F.conv1d, f(4, 6, 5), f(4, 6, 3), f(4)),
    (F.conv2d, f(2, 4, 5, 5), f(6, 4, 3, 3)),
    (F.conv1d, f(6, 6, 5), f(6, 1, 3), f(6), 1, 2, 1, 6),
    (F.conv1d, f(6, 5), f(4, 6, 3)),
    (F.dropout, f(4, 6), 0.5, True),
    (F.dropout, f(4, 6), 0.5, False),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c[0].__name__)
def test_every_accepted_layout_holds(call: tuple[Any, ...], n: int) -> None:
    uses = list(accepted(*call, n=n))
    assert uses
    assert wrong(iter(uses)) == []


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_holds_with_unequal_ignored_labels_and_smoothing(reduction: str) -> None:
    uses = list(
        accepted(F.cross_entropy, f(7, 5), ids(7), n=2, reduction=reduction, label_smoothing=0.1, ignore_index=-100)
    )
    assert {u.ins[0].dim for u in uses} == {0, 1}
    assert wrong(iter(uses)) == []


def test_grouped_attention_splits_only_whole_groups() -> None:
    q, k = f(2, 6, 3, 5), f(2, 3, 3, 5)
    found = kinds_of(F.scaled_dot_product_attention, q, k, k, enable_gqa=True, n=3)
    assert ("S(1)", "S(1)", "S(1)", "->", "S(1)") in found
    assert wrong(accepted(F.scaled_dot_product_attention, q, k, k, enable_gqa=True, n=3)) == []
    halves = kinds_of(F.scaled_dot_product_attention, q, k, k, enable_gqa=True, n=2)
    assert ("S(1)", "S(1)", "S(1)", "->", "S(1)") not in halves


def test_a_row_split_linear_wants_its_bias_once() -> None:
    found = kinds_of(F.linear, f(3, 4), f(6, 4), f(6))
    assert ("S(1)", "S(1)", "P", "->", "P") in found
    assert ("S(1)", "S(1)", "R", "->", "P") not in found


def test_attention_dropout_drops_what_one_device_drops() -> None:
    uses = list(accepted(F.scaled_dot_product_attention, *(f(2, 4, 3, 5) for _ in range(3)), dropout_p=0.4, n=2))
    assert {u.replace for u in uses} == {"attention_dropout"}
    assert wrong(iter(uses)) == []


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=4, max_size=4), batched=st.booleans())
def test_products_hold_for_any_sizes(sizes: list[int], batched: bool) -> None:
    b, i, j, k = sizes
    assert wrong(accepted(torch.matmul, f(b, i, j), f(b, j, k) if batched else f(j, k), n=2)) == []
