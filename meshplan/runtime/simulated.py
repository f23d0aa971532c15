"""All ranks of a mesh in one process: groups whose collectives add up for real, without a process group.

Ranks are threads of which one runs at a time; it hands over where it waits in a collective. What the runtime keeps a
process (the step's depth, the edits that run, the gathers that are kept) is put back when a rank goes on: each has a
process to itself.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.build import Groups
from meshplan.runtime.comm import AxisGroup, Pending
from meshplan.runtime.editing import Editing
from meshplan.runtime.regather import Keeping
from meshplan.runtime.views import Step

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass
class _Round:
    """One collective that is under way: what each rank of the group brought, and what it said it is."""

    laid: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    full: bool = False


class World:
    """Where simulated ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Condition()
        self._rounds: dict[Any, _Round] = {}
        self._alive, self._waiting = size, 0
        self._failed: BaseException | None = None

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(rank)` on every rank; results in rank order.

        Raises the first error of any rank, and PlanError `ranks-apart` where ranks wait for each other in different
        collectives, or for one that has ended.
        """
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            with self._turn:
                _put_back((0, [], []))
                try:
                    if self._failed is None:
                        results[rank] = work(rank)
                except BaseException as error:
                    self._fail(error)
                self._alive -= 1
                self._notice_deadlock()

        ambient = _taken()
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _put_back(ambient)
        if self._failed is not None:
            raise self._failed
        return results

    def exchange(self, group: Any, size: int, position: int, what: str, x: Tensor) -> list[Tensor]:
        """Bring `x` to the collective `what` of `group` and take everyone's, by position in the group."""
        meeting = self._rounds.setdefault(group, _Round())
        meeting.laid[position] = (what, x.detach().clone())
        if len(meeting.laid) == size:
            del self._rounds[group]
            meeting.full = True
            self._waiting -= size - 1
            self._turn.notify_all()
        else:
            self._waiting += 1
            self._notice_deadlock()
            mine = _taken()
            while not meeting.full and self._failed is None:
                self._turn.wait()
            _put_back(mine)
        if self._failed is not None:
            raise self._failed
        said = {what for what, _ in meeting.laid.values()}
        if len(said) > 1:
            raise _apart(f"meet in different collectives: {', '.join(sorted(said))}")
        return [meeting.laid[i][1] for i in range(size)]

    def _fail(self, error: BaseException) -> None:
        self._failed = self._failed or error
        self._turn.notify_all()

    def _notice_deadlock(self) -> None:
        if self._failed is None and self._alive and self._waiting == self._alive:
            waits = sorted({what for r in self._rounds.values() for what, _ in r.laid.values()})
            self._fail(_apart(f"wait for ranks that do not come: {', '.join(waits)}"))


def _taken() -> tuple[int, list[Any], list[Any]]:
    """What the runtime keeps of the rank that runs now."""
    return Step.depth, list(Editing.running), list(Keeping.running)


def _put_back(kept: tuple[int, list[Any], list[Any]]) -> None:
    Step.depth, Editing.running[:], Keeping.running[:] = kept


def _apart(what: str) -> PlanError:
    return PlanError(f"the ranks of one program {what}", code="ranks-apart")


@dataclass(frozen=True)
class SimulatedGroup(AxisGroup):
    """An `AxisGroup` over threads. `key` tells apart the groups of one world."""

    world: World = field(default_factory=lambda: World(1), compare=False)
    key: Any = None

    def all_gather(self, x: Tensor, dim: int, size: int | None = None) -> Tensor:
        if self.size == 1:
            return x
        full = torch.cat(self._everyone("all_gather", x), dim)
        if size is not None and full.shape[dim] != size:
            raise _apart(f"gather {full.shape[dim]} of {size} on dim {dim} over {self.axis}")
        return full

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        return self.shard(functools.reduce(operator.add, self._everyone("reduce_scatter", x)), dim).contiguous()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        if self.size == 1:
            return x
        return functools.reduce(_COMBINE[op], self._everyone(f"all_reduce {op}", x))

    def all_to_all(self, x: Tensor, cut: int, join: int) -> Tensor:
        if self.size == 1:
            return x
        if x.shape[cut] % self.size:
            raise _apart(f"send {x.shape[cut]} of dim {cut} in equal pieces over {self.axis}")
        return torch.cat([self.shard(part, cut) for part in self._everyone("all_to_all", x)], join)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self._check_sizes(x, send, receive)
        if self.size == 1:
            return x
        sizes = [s.tolist() for s in self._everyone("all_to_all", torch.tensor(send))]
        if [s[self.rank] for s in sizes] != list(receive):
            raise _apart(f"expect {list(receive)} rows over {self.axis}, and {[s[self.rank] for s in sizes]} come")
        parts = self._everyone("uneven all_to_all", x, equal=False)
        return torch.cat([part.split(s)[self.rank] for part, s in zip(parts, sizes, strict=True)])

    def start_all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return Pending(self.all_to_all_uneven(x, send, receive))

    def start_all_gather(self, x: Tensor) -> Pending:
        return Pending(self.all_gather(x, 0))

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        return Pending(self.reduce_scatter(x, 0))

    def shift(self, x: Tensor, by: int = 1) -> Pending:
        if self.size == 1:
            return Pending(x)
        return Pending(self._everyone(f"shift by {by}", x)[(self.rank - by) % self.size])

    def share(self, message: Tensor) -> Iterator[tuple[int, Tensor]]:
        if self.size == 1:
            return super().share(message)
        came = self._everyone("share", message)
        return iter([((self.rank + step) % self.size, came[(self.rank + step) % self.size]) for step in range(self.size)])

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        if self.size == 1:
            return super().collect(parts)
        theirs = self._everyone("collect", torch.stack(list(parts)))
        return functools.reduce(operator.add, [theirs[(self.rank + step) % self.size][self.rank] for step in range(self.size)])

    def _everyone(self, op: str, x: Tensor, equal: bool = True) -> list[Tensor]:
        parts = self.world.exchange(self.key, self.size, self.rank, f"{op} over {self.axis}", x)
        if equal and op != "all_gather" and len({tuple(p.shape) for p in parts}) > 1:
            raise _apart(f"reduce unequal shapes over {self.axis}: {[list(p.shape) for p in parts]}")
        return parts


@dataclass(frozen=True)
class SimulatedGroups(Groups):
    """The groups of one rank of a simulated world."""

    world: World = field(default_factory=lambda: World(1), compare=False)

    def group(self, *axes: str) -> SimulatedGroup:
        found = super().group(*axes)
        members = self.spec.group_of(self.rank, *axes)
        return SimulatedGroup(found.axis, found.size, found.rank, world=self.world, key=(found.axis, members))
