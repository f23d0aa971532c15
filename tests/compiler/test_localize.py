"""Arguments with sizes become this rank's, and subscripts are compared by what they select."""

from __future__ import annotations

import pytest

from meshplan import compat
from meshplan.compiler.localize import local_leaves, same_constant, same_index


def local(name: str, args: tuple, outs: list[tuple[int, ...]], sizes: list[int] | None = None, **kwargs) -> list:
    leaves, structure = compat.flatten((args, kwargs))
    return local_leaves(name, leaves, structure, outs, sizes)


def test_views_take_the_local_shape():
    assert local("view", ("x", 4, 9, 8, 2), [(2, 9, 4, 2)])[0] == ("x", [2, 9, 4, 2])
    assert local("reshape", ("x", [4, -1]), [(2, 36)])[0] == ("x", [2, 36])


def test_unflatten_takes_only_its_own_dims():
    assert local("unflatten", ("x", -1, (3, 4)), [(5, 3, 2)])[0] == ("x", 1, [3, 2])


def test_split_sizes_are_local():
    assert local("split", ("x", 8), [(2, 4), (2, 4)], [4, 4], dim=-1) == [("x", [4, 4]), {"dim": -1}]


def test_fills_keep_their_value():
    assert local("full", ([4, 6], 7.0), [(2, 6)])[0] == ([2, 6], 7.0)
    assert local("new_zeros", ("x", 4, 6), [(2, 6)])[0] == ("x", [2, 6])


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (slice(None, 8), slice(None, 4), True),  # each takes the whole of its dim
        (slice(None, 3), slice(None, 3), True),
        (slice(1, None), slice(1, None), True),
        (slice(None, 3), slice(None, 2), False),
        ((slice(None), 0), (slice(None), 0), True),
        ((Ellipsis, slice(0, 5)), (Ellipsis, slice(0, 5)), True),
        ((None, slice(None)), (slice(None),), False),
        (0, 1, False),
    ],
)
def test_subscripts(a, b, same):
    assert same_index(a, (8, 5), b, (4, 5)) is same


def test_constants():
    assert same_constant(1, 1.0) and not same_constant("a", 1) and same_constant(None, None)
    assert not same_constant(1 / 8, 1 / 4)
