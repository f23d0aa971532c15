"""How the keys and values of a ring get around its ranks, and their gradients home: passed on from rank to rank, or pulled.

    PassedOn  forward   own KV, then that of the rank before, ...: KV goes on n - 1 times, sent before it is computed on
              backward  begins with the KV that came last, and walks back: own KV comes last. The gradient of a KV travels with
                        it, is added to at each rank and ends at home: KV and dKV go back n - 1 times each
    Pulled    forward   own KV, then that of the next rank, ...: each is read out of its owner's memory, while the one before is
                        computed on (`meshplan.runtime.peer_ring`)
              backward  the same again. Gradients are kept until all are there; each rank then pulls the n - 1 parts of its own

Both move the same bytes. Pulled waits for no rank in between, and holds the gradient of all keys and values of one layer for the
time of its backward. The order of all sums is fixed. (Passed on: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers", 2023; walking back from where forward ended as in TransformerEngine's `AttnFuncWithCPAndKVP2P`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from meshplan.runtime.comm import AxisGroup, Pending

TRANSPORTS = ("send", "peer")


class Travel(Protocol):
    """One forward, or one backward, of one ring."""

    def out(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its message) of every rank, own first. To be run to the end."""
        ...

    def kept(self, own: Tensor, last: Tensor) -> Tensor:
        """What backward begins with, of the messages that `out` gave first and last."""
        ...

    def back(self, kept: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its message) of every rank; before the next is asked for, `give` is told the gradient of this one."""
        ...

    def give(self, source: int, gradient: Tensor) -> None:
        """This rank's share in the gradient of the message of `source`; the tensor is the ring's from now on."""
        ...

    def home(self) -> Tensor:
        """The gradient of own message, when `back` has ended."""
        ...


def travel(transport: str, group: AxisGroup) -> Travel:
    """One of `TRANSPORTS` over `group`."""
    return Pulled(group) if transport == "peer" else PassedOn(group)


class PassedOn:
    """`Travel` by send and receive with the two neighbours."""

    def __init__(self, group: AxisGroup) -> None:
        self.group = group
        self.left = group.size - 1  # gradients to send on
        self.returning: Pending | None = None
        self.gradient: Tensor | None = None

    def out(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        return self._walk(own, self.group.rank, 1)

    def kept(self, own: Tensor, last: Tensor) -> Tensor:
        return last

    def back(self, kept: Tensor) -> Iterator[tuple[int, Tensor]]:
        return self._walk(kept, self.group.rank + 1, -1)

    def give(self, source: int, gradient: Tensor) -> None:
        if self.returning is not None:
            gradient.add_(self.returning.wait())
        self.gradient = gradient
        if self.left:  # it travels while the next keys are computed on
            self.returning, self.left = self.group.shift(gradient, -1), self.left - 1

    def home(self) -> Tensor:
        assert self.gradient is not None
        return self.gradient

    def _walk(self, message: Tensor, first: int, by: int) -> Iterator[tuple[int, Tensor]]:
        n = self.group.size
        for hop in range(n):
            coming = self.group.shift(message, by) if hop < n - 1 else None
            yield (first - by * hop) % n, message
            if coming is not None:
                message = coming.wait()


class Pulled:
    """`Travel` by reading the peers' memory."""

    def __init__(self, group: AxisGroup) -> None:
        self.group = group
        self.parts: dict[int, Tensor] = {}

    def out(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        return self.group.share(own)

    def kept(self, own: Tensor, last: Tensor) -> Tensor:
        return own

    def back(self, kept: Tensor) -> Iterator[tuple[int, Tensor]]:
        return self.group.share(kept)

    def give(self, source: int, gradient: Tensor) -> None:
        self.parts[source] = gradient

    def home(self) -> Tensor:
        return self.group.collect([self.parts[rank] for rank in range(self.group.size)])
