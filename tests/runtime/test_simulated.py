"""Ranks as threads: collectives that add up, state that each rank has to itself, and ranks that do not meet."""

import pytest
import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.boundary import move
from meshplan.runtime.simulated import SimulatedGroups, World
from meshplan.runtime.views import Step

SPEC = MeshSpec((("dp_shard", 2), ("tp", 3)))


def groups(world: World, rank: int) -> SimulatedGroups:
    return SimulatedGroups(SPEC, rank, world=world)


def test_each_axis_reduces_over_its_own_ranks() -> None:
    world = World(6)

    def work(rank: int) -> list[int]:
        return [int(groups(world, rank).group(axis).all_reduce(torch.tensor(rank))) for axis in ("dp_shard", "tp")]

    found = world.run(work)
    # tp groups are {0, 1, 2} and {3, 4, 5}; dp_shard groups {0, 3}, {1, 4}, {2, 5}.
    assert found == [[3, 3], [5, 3], [7, 3], [3, 12], [5, 12], [7, 12]]


def test_uneven_shards_gather_and_scatter() -> None:
    world = World(6)

    def work(rank: int) -> tuple[list[float], list[float]]:
        group = groups(world, rank).group("tp")
        full = torch.arange(7.0)
        mine = group.shard(full, 0)
        return group.all_gather(mine, 0, 7).tolist(), group.reduce_scatter(full, 0).tolist()

    assert world.run(work)[2] == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [18.0])


def test_backward_collectives_meet_too() -> None:
    world = World(6)

    def work(rank: int) -> float:
        x = torch.tensor(1.0, requires_grad=True)
        y: Tensor = move(x, "I", "R", groups(world, rank).group("tp"))
        (y * (rank + 1)).backward()
        assert x.grad is not None
        return x.grad.item()

    assert world.run(work) == [6.0, 6.0, 6.0, 15.0, 15.0, 15.0]


def test_a_rank_finds_its_own_state_after_waiting() -> None:
    world = World(6)

    def work(rank: int) -> int:
        Step.depth = 10 + rank
        groups(world, rank).group("dp_shard", "tp").all_reduce(torch.zeros(1))
        found = Step.depth
        Step.depth = 0
        return found

    assert world.run(work) == [10, 11, 12, 13, 14, 15]


def test_ranks_in_different_collectives_are_told() -> None:
    world = World(6)

    def work(rank: int) -> None:
        group = groups(world, rank).group("tp")
        group.all_gather(torch.zeros(1), 0) if rank == 1 else group.all_reduce(torch.zeros(1))

    with pytest.raises(PlanError, match="different collectives: all_gather over tp, all_reduce sum over tp"):
        world.run(work)


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    world = World(6)

    def work(rank: int) -> None:
        if rank != 4:
            groups(world, rank).group("tp").all_reduce(torch.zeros(1))

    with pytest.raises(PlanError, match="wait for ranks that do not come"):
        world.run(work)


def test_the_first_error_of_a_rank_is_raised() -> None:
    world = World(6)

    def work(rank: int) -> None:
        if rank == 3:
            raise ValueError("rank 3")
        groups(world, rank).group("tp").all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 3"):
        world.run(work)


def test_a_rank_that_starts_while_another_waits_starts_clean() -> None:
    world = World(6)

    def work(rank: int) -> int:
        found = Step.depth
        Step.depth = 1
        groups(world, rank).group("dp_shard", "tp").all_reduce(torch.zeros(1))
        return found

    assert world.run(work) == [0] * 6
    assert Step.depth == 0
