"""A ring without passing on: each rank publishes its message where its peers can read it, and pulls each of theirs once.

    publish   wait until whoever reads the window has taken what was in it, put the message there, say that epoch e is ready
    pull      wait until its owner has said so, copy the window, say that it is taken

No rank waits for what a rank in between has to pass on. There are two windows, so that one can be filled while the other is read.
How memory is shared and how a rank says something is the subclass's: `shared_ring.py` for processes of one host,
`meshplan.kernels.attention.peer_ring` for GPUs of one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

SLOTS = 2
"""Windows of a rank; epoch e is in window e % SLOTS."""


class PeerRing(Protocol):
    """How messages of equal size get around. All ranks make the same calls in the same order."""

    def share(self, message: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its message) of every rank, this one first, then the next, ...: while one is used the next is on its way.

        To be run to the end. A message that was yielded is good until the next is asked for.
        """
        ...

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over ranks of their `parts[this rank]`, own first, then the next rank's, ...: at every run the same bits."""
        ...


class Coming(Protocol):
    """A message on its way."""

    def wait(self) -> Tensor:
        """It, for what the caller does next."""
        ...


class PullRing:
    """`PeerRing` over windows that peers read; subclasses say how one is published and pulled.

    Attributes:
        rank, ranks: this one, and how many there are.
    """

    rank: int
    ranks: int

    def share(self, message: Tensor) -> Iterator[tuple[int, Tensor]]:
        return self._shared(
            message, self.publish(message, None)
        )  # published when called, whoever runs the iterator first

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        *_, total = self.collecting(parts)
        return total

    def collecting(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """`collect` step by step: stops where this rank has published and is about to pull, and gives the sum so far."""
        total = parts[self.rank].clone()
        for step in range(1, self.ranks):
            target, source = (self.rank - step) % self.ranks, (self.rank + step) % self.ranks
            epoch = self.publish(parts[target], target)
            yield total
            total += self.pull(source, epoch, total, step % 2).wait()
        yield total

    def publish(self, message: Tensor, reader: int | None) -> int:
        """Put `message` into the window for `reader` (None: every peer). Returns its epoch."""
        raise NotImplementedError

    def pull(self, source: int, epoch: int, like: Tensor, landing: int) -> Coming:
        """Begin to copy what `source` published as `epoch`, which looks like `like`, to landing place 0 or 1."""
        raise NotImplementedError

    def _shared(self, message: Tensor, epoch: int) -> Iterator[tuple[int, Tensor]]:
        order = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        coming: list[Any] = [self.pull(source, epoch, message, at % 2) for at, source in enumerate(order[:1])]
        yield self.rank, message
        for at, source in enumerate(order):
            if at + 1 < len(order):
                coming.append(self.pull(order[at + 1], epoch, message, (at + 1) % 2))
            yield source, coming[at].wait()
