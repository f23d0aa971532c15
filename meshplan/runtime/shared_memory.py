"""Memory of processes on one host, a region each, mapped by all of them: what CPU ranks have in the place of NVLink."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from meshplan.errors import PlanError

_MEMORY = "/dev/shm"  # files that never reach a disk, where there are any


class Meeting:
    """Keys of a store under one prefix, used once, where ranks wait for each other.

    Arguments:
        base: the prefix; what: what the ranks are a part of, for errors; timeout_s: seconds to wait for the slowest peer.
    """

    def __init__(self, store: Store, base: str, rank: int, what: str, timeout_s: float = 300) -> None:
        self.store, self.base, self.rank, self.what = store, base, rank, what
        self.timeout = timedelta(seconds=timeout_s)

    def say(self, key: str, value: str = "") -> None:
        self.store.set(f"{self.base}/{key}", value)

    def forget(self, key: str) -> None:
        self.store.delete_key(f"{self.base}/{key}")

    def read(self, key: str) -> str:
        """What a rank said. Raises PlanError `rank-missing` after the timeout."""
        self.wait(key)
        return self.store.get(f"{self.base}/{key}").decode()

    def wait(self, *keys: str) -> None:
        """Until all of them are said. Raises PlanError `rank-missing` after the timeout."""
        try:
            self.store.wait([f"{self.base}/{key}" for key in keys], self.timeout)
        except RuntimeError as error:
            raise PlanError(
                f"rank {self.rank} of {self.what} waited {self.timeout.total_seconds():g} s for a peer ({', '.join(keys)})",
                code="rank-missing", legal="see the other ranks' own output",
            ) from error  # fmt: skip


def map_files(meeting: Meeting, ranks: int, size: int, folder: str | None = None) -> list[Tensor]:
    """uint8 [size] of each rank, zero at first. Every rank calls it with an equal `size`.

    Arguments:
        folder: where the file is made that the others map; it is gone once they have. Default: memory, where there is such.
    """
    handle, path = tempfile.mkstemp(prefix="meshplan-", dir=folder or (_MEMORY if os.access(_MEMORY, os.W_OK) else None))
    os.truncate(handle, size)
    os.close(handle)
    try:
        meeting.say(f"file/{meeting.rank}", path)
        paths = [meeting.read(f"file/{r}") for r in range(ranks)]
        regions = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
        meeting.say(f"mapped/{meeting.rank}")
        meeting.wait(*(f"mapped/{r}" for r in range(ranks)))
    finally:
        os.unlink(path)  # what is mapped stays
    return regions
