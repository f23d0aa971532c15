"""A peer ring of processes on one host: each maps the others' windows, and the store says what is ready and what is taken.

What CPU ranks have in the place of NVLink. The store orders what one process writes before what another reads, on any processor;
an epoch that all its readers have taken leaves nothing behind in it.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from meshplan.errors import PlanError
from meshplan.runtime.peer_ring import SLOTS, Coming, PullRing

_MEMORY = "/dev/shm"  # files that never reach a disk, where there are any


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
        self.store, self.base, self.rank, self.ranks, self.window = store, base, rank, ranks, window
        self.timeout = timedelta(seconds=timeout_s)
        self.epoch = 0
        self._readers: dict[int, list[int]] = {}
        handle, path = tempfile.mkstemp(prefix="meshplan-", dir=folder or (_MEMORY if os.access(_MEMORY, os.W_OK) else None))
        os.truncate(handle, SLOTS * window)
        os.close(handle)
        try:
            store.set(f"{base}/file/{rank}", path)
            self._regions = [self._mapped(self._read(f"file/{r}")) for r in range(ranks)]
            store.set(f"{base}/mapped/{rank}", "")
            self._wait(*(f"mapped/{r}" for r in range(ranks)))
        finally:
            os.unlink(path)  # what is mapped stays

    def publish(self, message: Tensor, reader: int | None) -> int:
        size = message.numel() * message.element_size()
        assert size <= self.window, (size, self.window)
        self.epoch += 1
        before = self.epoch - SLOTS
        for r in self._readers.pop(before, []):
            self._wait(f"taken/{self.rank}/{before}/{r}")
            self.store.delete_key(f"{self.base}/taken/{self.rank}/{before}/{r}")
        if before > 0:
            self.store.delete_key(f"{self.base}/ready/{self.rank}/{before}")
        self._slot(self.rank, self.epoch, message).copy_(message)
        self._readers[self.epoch] = [r for r in range(self.ranks) if r != self.rank] if reader is None else [reader]
        self.store.set(f"{self.base}/ready/{self.rank}/{self.epoch}", "")
        return self.epoch

    def pull(self, source: int, epoch: int, like: Tensor, landing: int) -> Coming:
        return _Pull(self, source, epoch, like)

    def take(self, source: int, epoch: int, like: Tensor) -> Tensor:
        """A copy of what `source` published as `epoch`."""
        self._wait(f"ready/{source}/{epoch}")
        came = self._slot(source, epoch, like).clone()
        self.store.set(f"{self.base}/taken/{source}/{epoch}/{self.rank}", "")
        return came

    def _slot(self, rank: int, epoch: int, like: Tensor) -> Tensor:
        start = epoch % SLOTS * self.window
        held = self._regions[rank][start : start + like.numel() * like.element_size()]
        return held.view(like.dtype).view(like.shape)

    def _mapped(self, path: str) -> Tensor:
        return torch.from_file(path, shared=True, size=SLOTS * self.window, dtype=torch.uint8)

    def _read(self, key: str) -> str:
        self._wait(key)
        return self.store.get(f"{self.base}/{key}").decode()

    def _wait(self, *keys: str) -> None:
        try:
            self.store.wait([f"{self.base}/{key}" for key in keys], self.timeout)
        except RuntimeError as error:
            raise PlanError(
                f"rank {self.rank} of a peer ring waited {self.timeout.total_seconds():g} s for a peer ({', '.join(keys)})",
                code="rank-missing", legal="see the other ranks' own output",
            ) from error  # fmt: skip


@dataclass(frozen=True)
class _Pull:
    """A pull that is made when it is waited for: the host copies, so there is nothing to hide it behind."""

    ring: SharedRing
    source: int
    epoch: int
    like: Tensor

    def wait(self) -> Tensor:
        return self.ring.take(self.source, self.epoch, self.like)
