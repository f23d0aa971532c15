"""Collectives over one axis of the mesh, on plain local tensors: real on a process group, shape-only while compiling.

Every collective the lowered program makes goes through an `AxisGroup`. With `name=None` the group is *abstract*:
nothing is sent, results have the right shape and dtype, and the call is reported to `on_call`. The compiler runs the
very same boundaries and operators over abstract groups, which is why the comm graph cannot differ from the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.runtime import peers

_ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE, _ALL_TO_ALL, _WAIT = compat.functional_collectives()

OnCall = Callable[[str, "AxisGroup", Tensor], None]
UNEVEN = "_uneven"
"""Behind the name of a collective whose sizes depend on data, when an abstract group tells of it: they are an example."""


def chunk_sizes(size: int, n: int) -> list[int]:
    """Sizes of the `n` shards of a dim of `size`, as `torch.chunk` and DTensor cut it: ceil(size/n) rows first,
    then a shorter one, then empty ones. `chunk_sizes(7, 4)` is `[2, 2, 2, 1]`."""
    step = -(-size // n)
    return [max(0, min(step, size - i * step)) for i in range(n)]


def chunk_size(size: int, n: int, index: int) -> int:
    """Entry `index` of `chunk_sizes(size, n)`, without making the list."""
    step = -(-size // n)
    return max(0, min(step, size - index * step))


def chunk_offset(size: int, n: int, index: int) -> int:
    """First index of shard `index` of a dim of `size` cut in `n` (clamped to `size` for empty shards)."""
    return min(size, -(-size // n) * index)


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ only in their coordinate on `axis`, as one of them sees it.

    Attributes:
        axis: mesh axis name (`tp`), or names joined by `+` for a flattened group (`dp_shard+cp`).
        size: number of ranks in the group.
        rank: this rank's coordinate in the group, 0-based.
        name: the process group's registered name, or None for an abstract group.
        on_call: told of each collective as (op, group, full tensor) when abstract; full is the gathered or unreduced
            side.
    """

    axis: str
    size: int
    rank: int
    name: str | None = None
    on_call: OnCall | None = field(default=None, compare=False)

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over these ranks, which hold different data, rather than summed."""
        return set(self.axis.split("+")) <= {"dp_replicate", "dp_shard", "cp"}

    def all_gather(self, x: Tensor, dim: int, size: int | None = None) -> Tensor:
        """Concatenate the ranks' shards along `dim`. `size` is the true length of the result when shards are uneven
        (cut as `chunk_sizes`); None means that all shards equal this one."""
        n, local = self.size, x.shape[dim]
        if n == 1:
            return x
        step = local if size is None else -(-size // n)
        if self.name is None:
            shape = list(x.shape)
            shape[dim] = step * n
            full = x.new_empty(shape)
            self._tell("all_gather", full)
        else:
            if local != step:
                x = _pad(x, dim, step)
            full = _send(_ALL_GATHER, x.contiguous(), n, self.name)
            if _outermost(x, dim):
                full = full.view(*x.shape[:dim], n * step, *x.shape[dim + 1 :])
            else:
                # Ranks arrive stacked on dim 0: split the stack off and move it beside `dim`.
                full = full.view(n, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
        if size is not None and step * n != size:
            # ceil-sized shards first means the padding is all at the end, in one piece.
            full = full.narrow(dim, 0, size)
        return full

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over the ranks and keep this rank's shard of `dim` (uneven lengths are padded on the wire)."""
        n, size = self.size, x.shape[dim]
        if n == 1:
            return x
        step = -(-size // n)
        padded = step * n != size
        if padded:
            x = _pad(x, dim, step * n)
        if self.name is None:
            self._tell("reduce_scatter", x)
            out = x.narrow(dim, 0, step).clone()
        else:
            if _outermost(x, dim):
                shape = x.shape[dim + 1 :]
                out = _send(_REDUCE_SCATTER, x.contiguous().view(n * step, *shape), "sum", n, self.name)
                if dim != 0:
                    out = out.view(*x.shape[:dim], step, *shape)
            else:
                x = x.unflatten(dim, (n, step)).movedim(dim, 0).flatten(0, 1)
                out = _send(_REDUCE_SCATTER, x.contiguous(), "sum", n, self.name)
        return out.narrow(dim, 0, chunk_sizes(size, n)[self.rank]) if padded else out

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The elementwise `op` ("sum", "max", "min") over the ranks, as a new tensor."""
        if self.size == 1:
            return x
        if self.name is None:
            self._tell("all_reduce", x)
            return x.clone()
        return _send(_ALL_REDUCE, x.contiguous(), op, self.name)

    def all_to_all(self, x: Tensor, cut: int, join: int) -> Tensor:
        """From whole on `cut` and sharded on `join` to sharded on `cut` and whole on `join`: each rank keeps its share of
        `cut` for all of `join`. Both come in equal shards; the caller has seen to it that the ranks divide `cut`."""
        n = self.size
        if n == 1:
            return x
        # One block a destination in front; what arrives is one block a source, which belongs beside `join`.
        blocks = x.unflatten(cut, (n, x.shape[cut] // n)).movedim(cut, 0).contiguous()
        if self.name is None:
            self._tell("all_to_all", blocks)
            blocks = blocks.clone()
        else:
            rows = blocks.flatten(0, 1) if blocks.dim() > 1 else blocks
            even = [rows.shape[0] // n] * n
            blocks = _send(_ALL_TO_ALL, rows, even, even, self.name).view(blocks.shape)
        return blocks.movedim(0, join).flatten(join, join + 1)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of `x` (dim 0) to where they belong. Two ranks, the second of which has nothing for the first:

            rank 0   x = a0 | a1 a2   send (1, 2), receive (1, 0)   -> a0
            rank 1   x =      b0      send (0, 1), receive (2, 1)   -> a1 a2 | b0

        Every rank calls it, with no row to send or to receive too. Rows that stay are among the `elements` that are told, and
        do not travel.

        Arguments:
            x: [sum(send), ...], what goes to rank 0 first.
            send: rows for each rank; receive: rows from each, which the ranks have told each other before.

        Returns:
            [sum(receive), ...], what rank 0 sent first.

        Raises:
            PlanError: `exchange-sizes` for sizes that cannot be those of this rank. Ranks whose sizes contradict each other are
                not noticed here: gloo then ends the process.
        """
        return self.start_all_to_all_uneven(x, send, receive).wait()

    def start_all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin `all_to_all_uneven`; the result's `wait()` gives what came. `x` must stay as it is until then. On CUDA it runs on
        a stream of its own, on gloo in a thread."""
        self._check_sizes(x, send, receive)
        if self.size == 1:
            return Pending(x)
        x = x.contiguous()
        if self.name is None:
            self.uneven()._tell("all_to_all", x)
            return Pending(x.new_empty((sum(receive), *x.shape[1:])))
        return _issue(_ALL_TO_ALL, x, list(receive), list(send), self.name)

    def start_all_gather(self, x: Tensor) -> Pending:
        """Begin `all_gather` of equal shards along dim 0, as `start_all_to_all_uneven`."""
        if self.size == 1:
            return Pending(x)
        if self.name is None:
            return Pending(self.all_gather(x, 0))
        return _issue(_ALL_GATHER, x.contiguous(), self.size, self.name)

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        """Begin `reduce_scatter` to equal shards along dim 0, as `start_all_to_all_uneven`."""
        if self.size == 1:
            return Pending(x)
        if self.name is None:
            return Pending(self.reduce_scatter(x, 0))
        return _issue(_REDUCE_SCATTER, x.contiguous(), "sum", self.size, self.name)

    def shift(self, x: Tensor, by: int = 1) -> Pending:
        """Start to send `x` to the rank `by` places on, in a ring, and to receive the like from `by` places back; the result's
        `wait()` gives what came. `x` must stay as it is until then."""
        if self.size == 1:
            return Pending(x)
        x = x.contiguous()
        came = torch.empty_like(x)
        if self.name is None:
            self._tell("send", x)
            self._tell("recv", came)
            return Pending(came)
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        return Pending(came, x, compat.exchange(self.name, x, to, came, source))

    def share(self, message: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's `message`, pulled out of its memory once: see `PeerRing.share`."""
        if self.size == 1:
            return iter([(self.rank, message)])
        if self.name is not None:
            return peers.share(self.name, message)
        came = [torch.empty_like(message) for _ in range(self.size - 1)]
        for x in came:
            self._tell("peer_pull", x)
        return iter([(self.rank, message), *(((self.rank + step) % self.size, x) for step, x in enumerate(came, 1))])

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of what all ranks have for this one, pulled out of their memory: see `PeerRing.collect`."""
        if self.size == 1:
            return parts[0]
        if self.name is not None:
            return peers.collect(self.name, parts)
        for _ in range(self.size - 1):
            self._tell("peer_pull", parts[self.rank])
        return parts[self.rank].clone()

    def through_memory(self, op: str, rows: Tensor) -> None:
        """Tell of `rows` that kernels take over: "peer_push" into peers' memory or "peer_pull" out of it. How many they are
        depends on data."""
        if self.name is not None:
            peers.note(op, rows, self.name)
        elif self.size > 1:
            self.uneven()._tell(op, rows)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of a replicated `x` along `dim`: a view, no communication."""
        size = x.shape[dim]
        return x.narrow(dim, chunk_offset(size, self.size, self.rank), chunk_sizes(size, self.size)[self.rank])

    def _check_sizes(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        fits = len(send) == len(receive) == self.size and sum(send) == x.shape[0] and min(*send, *receive) >= 0
        if not fits or send[self.rank] != receive[self.rank]:
            raise PlanError(
                f"rank {self.rank} of {self.size} on {self.axis} has {x.shape[0]} rows, sends {list(send)} of them and "
                f"receives {list(receive)}",
                code="exchange-sizes",
                legal="one size per rank, all rows sent, and as many kept as received from itself",
            )

    def uneven(self) -> AxisGroup:
        """The same ranks, for collectives whose sizes depend on data."""
        tell = self.on_call
        if tell is None:
            return self
        return replace(self, on_call=lambda op, group, full: tell(op + UNEVEN, group, full))

    def _tell(self, op: str, full: Tensor) -> None:
        if self.on_call is not None:
            self.on_call(op, self, full)


class Pending:
    """An exchange under way. It holds what is sent, which must live until it has left."""

    def __init__(self, came: Tensor, sent: Tensor | None = None, works: Sequence[Any] = ()) -> None:
        self._came, self._sent, self._works = came, sent, works

    def wait(self) -> Tensor:
        """What arrived; on CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._sent, self._works = None, ()
        return self._came


class _Issued(Pending):
    """One of the functional collectives, whose result names its own work."""

    def wait(self) -> Tensor:
        if self._sent is not None:
            with _unrecorded(self._sent):
                self._came = _WAIT(self._came)
            self._sent = None
        return self._came


def _issue(op: Any, x: Tensor, *settings: Any) -> Pending:
    with _unrecorded(x):
        return _Issued(op(x, *settings), x)


def _send(op: Any, x: Tensor, *settings: Any) -> Tensor:
    """Issue a functional collective and order what follows after it."""
    with _unrecorded(x):
        return _WAIT(op(x, *settings))


def _unrecorded(x: Tensor) -> Any:
    """A context for a collective of `x`. The operators' own autograd is written in Python and costs more host time than the call
    itself; it is left out where there is nothing for it to record."""
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return contextlib.nullcontext()
    return compat.below_autograd()


def _outermost(x: Tensor, dim: int) -> bool:
    """Whether shards along `dim` follow each other in memory, so that nothing need be moved around a collective."""
    return dim == 0 or (x.shape[0] == 1 if dim == 1 else math.prod(x.shape[:dim]) == 1)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
