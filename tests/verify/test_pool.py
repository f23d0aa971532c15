"""The pool of ranks: results in order, worlds of any size, the first failure told, nothing left behind."""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshplan.errors import PlanError, Where
from meshplan.verify.pool import LocalPool, RankPool


def _rank_and_sum(offset: float, scale: float = 1.0) -> tuple[int, int, float]:
    x = torch.tensor([offset + dist.get_rank()], dtype=torch.float64) * scale
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def test_results_come_in_rank_order_from_a_group_of_every_rank(pool):
    assert pool.run(_rank_and_sum, 10.0) == [(r, 4, 46.0) for r in range(4)]


def test_a_sub_world_has_a_default_group_of_exactly_its_size(pool):
    assert pool.run(_rank_and_sum, 10.0, world=3) == [(r, 3, 33.0) for r in range(3)]
    assert pool.run(_rank_and_sum, 10.0, world=1) == [(0, 1, 10.0)]


def test_partials_and_keyword_arguments_reach_the_ranks(pool):
    assert pool.run(functools.partial(_rank_and_sum, scale=3.0), offset=1.0, world=2) == [(0, 2, 9.0), (1, 2, 9.0)]


def _process() -> tuple[int, int, bool]:
    return os.getpid(), torch.get_num_threads(), dist.is_initialized()


def test_processes_stay_warm_between_calls_and_compute_on_one_thread(pool):
    first, second = pool.run(_process), pool.run(_process, world=2)
    assert len({pid for pid, _, _ in first}) == 4
    assert [pid for pid, _, _ in second] == [pid for pid, _, _ in first[:2]]
    assert {threads for _, threads, _ in first} == {1}


def _open_groups(extra: int) -> int:
    for _ in range(extra):
        dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_made_by_a_call_are_gone_in_the_next(pool):
    assert pool.run(_open_groups, 3, world=2) == [4, 4]
    assert pool.run(_open_groups, 0, world=2) == [1, 1]


def _gather_over(names: tuple[str, str], axis: str) -> list[float]:
    """A DTensor sharded over one axis of a 2 x 2 mesh; groups are made beforehand so that their names shift."""
    for _ in range(2 if axis == "b" else 0):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    sub = mesh[axis]
    x = DTensor.from_local(torch.full((1, 1), float(dist.get_rank())), sub, [Shard(0)])
    return (x + x).redistribute(placements=[Replicate()]).to_local().flatten().tolist()


def test_meshes_cached_by_an_earlier_call_do_not_leak_groups_into_the_next(pool):
    over_a = [[0.0, 4.0], [2.0, 6.0], [0.0, 4.0], [2.0, 6.0]]
    over_b = [[0.0, 2.0], [0.0, 2.0], [4.0, 6.0], [4.0, 6.0]]
    for axis, expected in (("a", over_a), ("b", over_b), ("a", over_a)):
        assert pool.run(_gather_over, ("a", "b"), axis) == expected


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise PlanError("no such module", code="no-such-module", where=Where("plan.yaml", 3, 1), legal="layers.0")
    dist.all_reduce(torch.ones(1))


def test_the_rank_that_failed_first_is_raised_with_all_tracebacks_and_the_ranks_stay_warm(pool):
    before = pool.run(_process)
    with pytest.raises(PlanError) as caught:
        pool.run(_fail_on, 2)
    assert caught.value.code == "no-such-module"
    assert str(caught.value.where) == "plan.yaml:3:1"
    cause = str(caught.value.__cause__)
    assert cause.startswith("rank 2 failed first")
    assert [f"--- rank {r}\n" in cause for r in range(4)] == [True] * 4
    assert pool.run(_process) == before


class _Unpicklable(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number} {text}")


def _raise_unpicklable() -> None:
    raise _Unpicklable(3, "apples")


def test_an_exception_that_cannot_travel_is_told_by_its_traceback(pool):
    with pytest.raises(PlanError, match="_Unpicklable: 3 apples") as caught:
        pool.run(_raise_unpicklable, world=2)
    assert caught.value.code == "rank-failed"


def test_a_function_that_cannot_be_imported_is_refused(pool):
    with pytest.raises(PlanError) as caught:
        pool.run(lambda: 1)
    assert caught.value.code == "not-importable"


@pytest.mark.parametrize("world", [0, 5])
def test_a_world_that_does_not_fit_is_refused(pool, world):
    with pytest.raises(PlanError) as caught:
        pool.run(_process, world=world)
    assert caught.value.code == "bad-world-size"


def test_a_local_pool_borrows_a_running_one_and_leaves_it_running(pool):
    with LocalPool(2) as borrowed:
        assert borrowed.n >= 2
        pids = [pid for pid, _, _ in borrowed.run(_process, world=2)]
    with LocalPool(2) as again:
        assert [pid for pid, _, _ in again.run(_process, world=2)] == pids


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.all_reduce(torch.ones(1))


def _fail_beside_a_sleeper() -> None:
    if dist.get_rank() == 0:
        raise ValueError("boom")
    time.sleep(600)


def test_ranks_that_hang_or_die_are_named_and_replaced(monkeypatch):
    monkeypatch.setattr("meshplan.verify.pool.GRACE", 0.5)
    with RankPool(2) as small:
        small.run(_process)
        with pytest.raises(ValueError, match="boom"):
            small.run(_fail_beside_a_sleeper)  # long before the time-out of the call
        small.run(_process)
        with pytest.raises(PlanError, match=r"ranks \[1\] of 2 did not answer") as caught:
            small.run(_hang_on, 1, timeout=3)
        assert caught.value.code == "rank-timeout"
        with pytest.raises(PlanError, match="rank 0 was ended by SIGABRT") as caught:
            small.run(_abort_on, 0)
        assert caught.value.code == "rank-died"
        assert small.run(_rank_and_sum, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]
