"""Ranks as threads of one process: an `AxisGroup` that adds up for real, for worlds larger than a test should spawn."""

import functools
import itertools
import math
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshplan.ops.calls import Call
from meshplan.runtime.comm import AxisGroup


class Meeting:
    """Where the threads of one group lay down a tensor each and take all of them away."""

    def __init__(self, n: int) -> None:
        self.barrier = threading.Barrier(n, timeout=30)
        self.slots: list[Tensor] = [torch.empty(0)] * n

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x.detach().clone()
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


@dataclass(frozen=True)
class SimulatedGroup(AxisGroup):
    meeting: Meeting = field(default_factory=lambda: Meeting(1), compare=False)
    log: list[Call] = field(default_factory=list, compare=False)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        if self.size == 1:
            return x
        self.log.append(Call("all_reduce", self.axis, x.numel()))
        combine = {"sum": operator.add, "max": torch.maximum, "min": torch.minimum}[op]
        return functools.reduce(combine, self.meeting.exchange(self.rank, x))


def run_ranks(mesh: dict[str, int], fn: Callable[[dict[str, SimulatedGroup]], Any]) -> list[Any]:
    """`fn(groups by axis)` on every rank of `mesh` (axis -> degree, outermost first); results in rank order.

    All groups of a rank share one `log` of the collectives the rank made.
    """
    coordinates = list(itertools.product(*(range(n) for n in mesh.values())))
    meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}
    results: list[Any] = [None] * math.prod(mesh.values())
    errors: list[BaseException] = []
    groups_of_rank = []
    for at in coordinates:
        log: list[Call] = []
        groups = {}
        for i, (axis, size) in enumerate(mesh.items()):
            meeting = meetings.setdefault((axis, at[:i] + at[i + 1 :]), Meeting(size))
            groups[axis] = SimulatedGroup(axis, size, at[i], meeting=meeting, log=log)
        groups_of_rank.append(groups)

    def work(rank: int) -> None:
        try:
            results[rank] = fn(groups_of_rank[rank])
        except BaseException as error:
            errors.append(error)
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(coordinates))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
