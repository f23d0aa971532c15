"""Local shapes of every kind, with several axes on one dim, parts and copies."""

from __future__ import annotations

from meshplan.compiler.kinds import N, P
from meshplan.compiler.layout import Axis, axis_size, local_shape
from meshplan.plan.placements import Shard
from meshplan.runtime.comm import AxisGroup


def axes(*sizes: tuple[str, int, int]) -> list[Axis]:
    return [Axis(name, AxisGroup(name, n, rank), name.startswith("dp")) for name, n, rank in sizes]


def test_an_inner_axis_cuts_what_an_outer_one_left():
    on = axes(("dp_shard", 2, 1), ("tp", 3, 0))
    assert local_shape((11, 4), [Shard(0), Shard(0)], on) == (2, 4)  # 11 -> 6 + 5 -> 2 + 2 + 1
    assert axis_size((11, 4), 0, [Shard(0), Shard(0)], on, 1) == 5
    assert local_shape((11, 4), [N, P], on) == (11, 4)


def test_parts_are_cut_one_by_one():
    on = axes(("tp", 2, 0))
    assert local_shape((12,), [Shard(0, (8, 3, 1))], on) == (7,)  # 4 + 2 + 1
    assert local_shape((12,), [Shard(0, (8, 3, 1))], axes(("tp", 2, 1))) == (5,)


def test_copies_share_a_shard():
    few = Shard(0, None, 2)
    assert [local_shape((6,), [few], axes(("tp", 4, rank))) for rank in range(4)] == [(3,)] * 4
