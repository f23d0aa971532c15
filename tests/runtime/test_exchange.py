"""all_to_all and the ring's shift: the same values on gloo ranks, on simulated ones and by hand; what abstract groups foretell
is what is recorded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives
from meshplan.runtime.simulated import SimulatedGroups, World

SHAPE = (2, 6, 8, 3)  # the ring's and the all_to_all's whole value; dim 2 comes sharded, dim 1 leaves sharded


def whole(n: int) -> Tensor:
    heads = 6 if n == 2 else 4
    shape = (SHAPE[0], heads, *SHAPE[2:])
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def exchanged(group: AxisGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mine = group.shard(whole(group.size), 2)
    there = group.all_to_all(mine, 1, 2)
    coming = group.shift(mine)
    return there, group.all_to_all(there, 2, 1), coming.wait(), group.shift(mine, -1).wait()


def expected(n: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    full = whole(n)
    shards = full.chunk(n, 2)
    return full.chunk(n, 1)[rank], shards[rank], shards[(rank - 1) % n], shards[(rank + 1) % n]


def check(n: int, rank: int, found: tuple[Tensor, ...]) -> None:
    for got, want in zip(found, expected(n, rank), strict=True):
        assert torch.equal(got, want)


def test_simulated_ranks_exchange() -> None:
    for n in (2, 4):
        world, spec = World(n), MeshSpec((("cp", n),))
        results = world.run(lambda rank, w=world, s=spec: exchanged(SimulatedGroups(s, rank, world=w).group("cp")))
        for rank, found in enumerate(results):
            check(n, rank, found)


def _real() -> tuple[tuple[Tensor, ...], list[tuple[str, int, str]]]:
    n, rank = dist.get_world_size(), dist.get_rank()
    group = AxisGroup("cp", n, rank, dist.group.WORLD.group_name)
    with record_collectives() as log:
        found = exchanged(group)
    return found, [(c.op, c.elements, c.dtype) for c in log]


def test_gloo_ranks_exchange_what_was_foretold(pool) -> None:
    for n in (2, 4):
        for rank, (found, log) in enumerate(pool.run(_real, world=n)):
            check(n, rank, found)
            told: list[tuple[str, int, str]] = []
            exchanged(
                AxisGroup("cp", n, rank, None, lambda op, g, t, told=told: told.append((op, t.numel(), "float64")))
            )
            assert log == told
            assert [op for op, *_ in log] == ["all_to_all", "send", "recv", "all_to_all", "send", "recv"]


def test_a_ring_of_one_sends_nothing() -> None:
    x = torch.arange(4.0)
    group = AxisGroup("cp", 1, 0)
    assert group.shift(x).wait() is x and group.all_to_all(x, 0, 0) is x
