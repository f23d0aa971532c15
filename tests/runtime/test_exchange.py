"""all_to_all, even and uneven, and the ring's shift: the same values on gloo ranks, on simulated ones and by hand; what abstract
groups foretell is what is recorded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.comm import UNEVEN, AxisGroup
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


# Rows that rank i sends to rank j: rank 1 has nothing, nobody sends to rank 3 but itself.
ROWS = ((2, 0, 3, 0), (0, 0, 0, 0), (1, 1, 0, 0), (0, 4, 1, 2))


def dealt(group: AxisGroup) -> Tensor:
    """Every row says where it comes from and where it goes."""
    send = ROWS[group.rank][: group.size]
    receive = [row[group.rank] for row in ROWS[: group.size]]
    to = torch.arange(group.size).repeat_interleave(torch.tensor(send)).double()
    x = torch.stack([torch.full_like(to, group.rank), to, torch.arange(len(to)).double()], 1)
    return group.all_to_all_uneven(x, send, receive)


def check_dealt(n: int, rank: int, found: Tensor) -> None:
    came = [(float(i), float(rank)) for i in range(n) for _ in range(ROWS[i][rank])]
    assert [tuple(row) for row in found[:, :2].tolist()] == came
    assert found.shape == (len(came), 3)


def test_simulated_ranks_deal_out_rows() -> None:
    for n in (2, 4):
        world, spec = World(n), MeshSpec((("ep", n),))
        for rank, found in enumerate(world.run(lambda r: dealt(SimulatedGroups(spec, r, world=world).group("ep")))):
            check_dealt(n, rank, found)


def _dealt() -> tuple[Tensor, list[tuple[str, int]]]:
    group = AxisGroup("ep", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    with record_collectives() as log:
        found = dealt(group)
    return found, [(c.op, c.elements) for c in log]


def test_gloo_ranks_deal_out_rows_as_was_foretold(pool) -> None:
    for n in (2, 4):
        for rank, (found, log) in enumerate(pool.run(_dealt, world=n)):
            check_dealt(n, rank, found)
            told: list[tuple[str, int]] = []
            group = AxisGroup("ep", n, rank, None, lambda op, g, t, told=told: told.append((op, t.numel())))
            assert dealt(group).shape == found.shape
            # An abstract group says that the size is data's.
            assert log == [(op.removesuffix(UNEVEN), n) for op, n in told] == [("all_to_all", 3 * sum(ROWS[rank][:n]))]


def begun(group: AxisGroup) -> tuple[Tensor, ...]:
    """Three exchanges under way together, and waited for from the last to the first."""
    send = ROWS[group.rank][: group.size]
    receive = [row[group.rank] for row in ROWS[: group.size]]
    x = torch.arange(3.0 * sum(send), dtype=torch.float64).view(-1, 3) + 100 * group.rank
    full = torch.arange(2.0 * group.size, dtype=torch.float64)[:, None] * (group.rank + 1)
    started = [
        group.start_all_to_all_uneven(x, send, receive),
        group.start_all_gather(full[:2]),
        group.start_reduce_scatter(full),
    ]
    return tuple(pending.wait() for pending in reversed(started))


def check_begun(n: int, rank: int, found: tuple[Tensor, ...]) -> None:
    summed, gathered, rows = found
    assert summed.flatten().tolist() == [x * n * (n + 1) / 2 for x in (2 * rank, 2 * rank + 1)]
    assert gathered.flatten().tolist() == [x * (source + 1) for source in range(n) for x in (0, 1)]
    first = [sum(ROWS[source][:rank]) for source in range(n)]
    numbers = [(source, first[source] + i) for source in range(n) for i in range(ROWS[source][rank])]
    assert rows.tolist() == [[100 * source + 3 * i + j for j in range(3)] for source, i in numbers]


def _begun() -> tuple[tuple[Tensor, ...], list[tuple[str, int]]]:
    group = AxisGroup("ep", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name)
    with record_collectives() as log:
        found = begun(group)
    return found, [(c.op, c.elements) for c in log]


def test_exchanges_can_be_under_way_together(pool) -> None:
    for n in (2, 4):
        world, spec = World(n), MeshSpec((("ep", n),))
        simulated = world.run(lambda r: begun(SimulatedGroups(spec, r, world=world).group("ep")))
        for rank, (found, log) in enumerate(pool.run(_begun, world=n)):
            check_begun(n, rank, found)
            check_begun(n, rank, simulated[rank])
            told: list[tuple[str, int]] = []
            group = AxisGroup("ep", n, rank, None, lambda op, g, t, told=told: told.append((op, t.numel())))
            assert [x.shape for x in begun(group)] == [x.shape for x in found]
            assert log == [(op.removesuffix("_uneven"), elements) for op, elements in told]
    x = torch.ones(2, 3)
    alone = AxisGroup("ep", 1, 0)
    for pending in (
        alone.start_all_to_all_uneven(x, [2], [2]),
        alone.start_all_gather(x),
        alone.start_reduce_scatter(x),
    ):
        assert pending.wait() is x and pending.wait() is x


@pytest.mark.parametrize("send, receive", [((1, 1), (1, 1)), ((3,), (3,)), ((1, 2), (2, 0)), ((4, -1), (4, 0))])
def test_sizes_that_cannot_be_are_refused_before_anything_is_sent(send, receive) -> None:
    with pytest.raises(PlanError) as refusal:
        AxisGroup("ep", 2, 0).all_to_all_uneven(torch.ones(3, 2), send, receive)
    assert refusal.value.code == "exchange-sizes"


def test_simulated_ranks_notice_that_they_expect_other_rows_than_come() -> None:
    world, spec = World(2), MeshSpec((("ep", 2),))

    def work(rank: int) -> Tensor:
        group = SimulatedGroups(spec, rank, world=world).group("ep")
        return group.all_to_all_uneven(torch.ones(1, 2), (0, 1) if rank == 0 else (1, 0), (0, 0))

    with pytest.raises(PlanError) as refusal:
        world.run(work)
    assert refusal.value.code == "ranks-apart"
