"""A peer ring of processes on one host: each maps the others' windows, and the store says what is ready and what is taken.

What CPU ranks have in the place of NVLink. The store orders what one process writes before what another reads, on any processor;
an epoch that all its readers have taken leaves nothing behind in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import Store

from meshplan.runtime.peer_ring import SLOTS, Coming, PullRing
from meshplan.runtime.shared_memory import Meeting, map_files


class SharedRing(PullRing):
    """`PullRing` over files that all ranks map. Every rank makes one, with an equal `base` and `window`.

    Arguments:
        store: where the ranks meet; base: prefix of the keys, used for one ring only.
        window: bytes of the largest message, a multiple of 16.
        timeout_s: seconds to wait for the slowest peer.
        folder: where the file is made that the others map; it is gone once they have. Default: memory, where there is such.
    """

    def __init__(
        self, store: Store, base: str, rank: int, ranks: int, window: int, timeout_s: float = 300, folder: str | None = None
    ) -> None:
        self.rank, self.ranks, self.window = rank, ranks, window
        self.epoch = 0
        self._readers: dict[int, list[int]] = {}
        self._meeting = Meeting(store, base, rank, "a peer ring", timeout_s)
        self._regions = map_files(self._meeting, ranks, SLOTS * window, folder)

    def publish(self, message: Tensor, reader: int | None) -> int:
        size = message.numel() * message.element_size()
        assert size <= self.window, (size, self.window)
        self.epoch += 1
        before = self.epoch - SLOTS
        for r in self._readers.pop(before, []):
            self._meeting.wait(f"taken/{self.rank}/{before}/{r}")
            self._meeting.forget(f"taken/{self.rank}/{before}/{r}")
        if before > 0:
            self._meeting.forget(f"ready/{self.rank}/{before}")
        self._slot(self.rank, self.epoch, message).copy_(message)
        self._readers[self.epoch] = [r for r in range(self.ranks) if r != self.rank] if reader is None else [reader]
        self._meeting.say(f"ready/{self.rank}/{self.epoch}")
        return self.epoch

    def pull(self, source: int, epoch: int, like: Tensor, landing: int) -> Coming:
        return _Pull(self, source, epoch, like)

    def take(self, source: int, epoch: int, like: Tensor) -> Tensor:
        """A copy of what `source` published as `epoch`."""
        self._meeting.wait(f"ready/{source}/{epoch}")
        came = self._slot(source, epoch, like).clone()
        self._meeting.say(f"taken/{source}/{epoch}/{self.rank}")
        return came

    def _slot(self, rank: int, epoch: int, like: Tensor) -> Tensor:
        start = epoch % SLOTS * self.window
        held = self._regions[rank][start : start + like.numel() * like.element_size()]
        return held.view(like.dtype).view(like.shape)


@dataclass(frozen=True)
class _Pull:
    """A pull that is made when it is waited for: the host copies, so there is nothing to hide it behind."""

    ring: SharedRing
    source: int
    epoch: int
    like: Tensor

    def wait(self) -> Tensor:
        return self.ring.take(self.source, self.epoch, self.like)
