"""Calls that move elements: every layout they are run in holds by value, fused dims in parts among them."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.plan.placements import Shard
from tests.compiler.rules.held import accepted, f, ids, kinds_of, wrong

T = torch.Tensor
CALLS: list[tuple[Any, ...]] = [
    (T.view, f(3, 4, 5), 3, 20),
    (T.view, f(3, 20), 3, 4, 5),
    (T.view, f(12, 5), 3, 4, 5),
    (T.view, f(6, 8), -1),
    (T.view, f(6, 8), 48),
    (T.flatten, f(4, 3, 5), 1),
    (T.flatten, f(4, 3, 5)),
    (T.unflatten, f(3, 12), -1, (4, 3)),
    (T.view, f(4, 6), 2, 2, 6),
    (T.view, f(4, 1, 6), 4, 6),
    (T.view, f(4, 6), 1, 4, 6, 1),
    (T.view, f(2, 12), 2, 3, 4),
    (T.view, f(2, 6, 4), 2, 24),
    (T.transpose, f(3, 4, 5), -1, -2),
    (T.permute, f(3, 4, 5), (2, 0, 1)),
    (T.t, f(3, 4)),
    (T.movedim, f(3, 4, 5), 0, -1),
    (T.unsqueeze, f(3, 4), -1),
    (T.squeeze, f(3, 1, 4)),
    (T.squeeze, f(3, 1, 4), -2),
    (T.expand, f(3, 1), 3, 4),
    (T.expand, f(3, 4), 2, 3, 4),
    (T.flip, f(3, 4), (-1,)),
    (torch.roll, f(3, 4), 1, -1),
    (T.repeat, f(3, 4), 2, 1, 1),
    (torch.triu, f(2, 4, 4)),
    (torch.repeat_interleave, f(4, 3), 2, 0),
    (torch.repeat_interleave, f(4, 3), 2, 1),
    (torch.cat, [f(4, 3), f(6, 3)], 0),
    (torch.cat, [f(3, 4), f(3, 6)], -1),
    (torch.cat, [f(3, 4), f(3, 0)], -1),
    (torch.cat, [f(0), f(6, 4)], 0),
    (torch.cat, [f(0), f(6, 4)], 1),
    (T.expand_as, f(4), f(3, 4)),
    (T.expand_as, f(4, 1, 6), f(4, 3, 6)),
    (torch.stack, [f(3, 4), f(3, 4)], -1),
    (torch.stack, [f(3, 4), f(3, 4)], 0),
    (torch.split, f(3, 8), 4, -1),
    (torch.split, f(3, 12), [6, 6], 1),
    (torch.chunk, f(3, 8), 2, -1),
    (torch.chunk, f(6, 3), 4),
    (torch.unbind, f(3, 4), -1),
    (T.narrow, f(3, 4), 1, 1, 2),
    (T.select, f(3, 4), -1, 0),
    (T.__getitem__, f(5, 4), 0),
    (T.__getitem__, f(5, 4), (slice(None), slice(0, 2))),
    (T.__getitem__, f(5, 4), (slice(None), None)),
    (T.__getitem__, f(4, 6), (Ellipsis, slice(None, None, 2))),
    (T.__getitem__, f(5, 4, 3), (slice(None), -1)),
    (T.unfold, f(4, 8), 1, 2, 1),
    (torch.view_as_complex, f(3, 4, 2)),
    (T.new_zeros, f(3, 4), (2, 5)),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c[0].__name__)
def test_every_accepted_layout_holds(call: tuple[Any, ...], n: int) -> None:
    uses = list(accepted(*call, n=n))
    assert uses
    assert wrong(iter(uses)) == []


@settings(max_examples=20, deadline=None)
@given(
    factors=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4),
    joints=st.tuples(st.integers(0, 15), st.integers(0, 15)),
)
def test_reshapes_hold_for_any_grouping_of_factors(factors: list[int], joints: tuple[int, int]) -> None:
    source, target = (_grouped(factors, joint) for joint in joints)
    assert wrong(accepted(T.reshape, f(*source), target, n=2)) == []


def _grouped(factors: list[int], joint: int) -> tuple[int, ...]:
    """Neighbouring factors multiplied where the bits of `joint` say so."""
    groups = [[factors[0]]]
    for k, factor in enumerate(factors[1:]):
        if joint >> k & 1:
            groups[-1].append(factor)
        else:
            groups.append([factor])
    return tuple(map(prod, groups))


FUSED: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]] = [
    (torch.split, (4, 8, 4), (8, -1)),
    (torch.chunk, (6, 6), (2, -1)),
    (T.view, (6, 6, 6), (5, 3, 6)),
    (T.view, (8, 8), (5, 2, 2, 4)),
]


@pytest.mark.parametrize(("func", "parts", "rest"), FUSED, ids=["split", "chunk", "view", "view-heads"])
def test_a_dim_split_part_by_part_is_opened_rightly(func: Any, parts: tuple[int, ...], rest: tuple[Any, ...]) -> None:
    if func is torch.split:
        rest = (list(parts), -1)
    uses = list(accepted(func, f(5, sum(parts)), *rest, n=2, held={0: [Shard(1, parts)]}))
    assert uses
    assert wrong(iter(uses)) == []


def test_joining_split_dims_gives_a_dim_split_part_by_part() -> None:
    assert ("S(0)", "S(0)", "->", "S(0, parts=[4, 6])") in kinds_of(torch.cat, [f(4, 3), f(6, 3)], 0)


def test_what_has_no_elements_leaves_a_split_dim_in_one_part() -> None:
    assert ("S(1)", "R", "->", "S(1)") in kinds_of(torch.cat, [f(3, 4), f(3, 0)], -1)


def test_a_squeeze_that_would_drop_a_short_shard_is_refused() -> None:
    # Three rows on two ranks are 2 + 1: the second rank's only row would vanish.
    assert ("S(0)", "->", "S(0)") not in kinds_of(T.squeeze, f(3, 1, 4))
    assert ("S(0)", "->", "S(0)") in kinds_of(T.squeeze, f(3, 1, 4), 1)
    assert ("S(0)", "->", "S(0)") in kinds_of(T.squeeze, f(4, 1, 4))


def test_a_heads_view_is_split_only_where_whole_heads_are() -> None:
    assert ("S(1)", "->", "S(1)") in kinds_of(T.view, f(3, 12), 3, 4, 3)
    assert ("S(1)", "->", "S(1)") not in kinds_of(T.view, f(3, 12), 3, 3, 4)


def test_a_meshgrid_is_made_from_whole_vectors() -> None:
    assert kinds_of(torch.meshgrid, f(4), f(6), indexing="ij") == set()


def test_an_index_that_moves_the_split_dim_is_followed() -> None:
    assert ("S(1)", "N", "->", "S(0)") not in kinds_of(T.__getitem__, f(4, 6), ids(3))
    assert ("S(1)", "N", "->", "S(1)") in kinds_of(T.__getitem__, f(4, 6), ids(3))
