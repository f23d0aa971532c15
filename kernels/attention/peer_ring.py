"""A ring that reads its peers' memory: each rank pulls each peer's message once, over NVLink, into memory of its own.

A kernel that computes on remote memory would read a message once for every tile of queries; pulled once, it costs what
a ring's hop costs, and no rank waits for what a rank in between has to pass on. What is where (n ranks, epoch e):

    window[e % 2]   this rank's message, pulled by the others           ready[r]   the epoch that rank r has published
                                                                        taken[r]   the epoch that rank r has pulled from here

    publish   wait for taken >= e - 2 of whoever reads the window, copy the message there, set ready[me] = e at every peer
    pull      wait for ready[r] >= e, copy window[e % 2] of rank r, set taken[me] = e at rank r

How flags are set and waited for is in `flags.py`. Everything is ordered by streams; no rank waits on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.flags import await_flag, set_flag
from meshplan.kernels.peers import map_regions, reach_each_other
from meshplan.runtime.peer_ring import SLOTS, Coming, PeerRing, PullRing

_WORD = 4
"""Bytes of what is copied at a time and of a flag: an int32."""
_PROGRAMS = 16
"""Programs that pull: enough to fill NVLink, few enough to leave the chip to the attention that runs beside them."""
_BLOCK = 4096


class Memory(NamedTuple):
    """A region of `region_size` bytes of each rank, mapped here.

    Attributes:
        rank: this one.
        local: uint8, its region; zero at first.
        pointers: addresses of all ranks' regions as this rank sees them.
        window: bytes of the largest message, a multiple of 16.
    """

    rank: int
    local: Tensor
    pointers: Sequence[int]
    window: int


def region_size(window: int, ranks: int) -> int:
    """Bytes that a rank's windows and flags take."""
    return SLOTS * window + 2 * ranks * _WORD


def open_ring(group: dist.ProcessGroup, window: int, device: torch.device) -> PeerRing:
    """A ring over `group` for messages of up to `window` bytes: through peers' memory on one node, by send and receive elsewhere.

    Every rank calls it, with the same `window`.
    """
    window = triton.cdiv(window, 16) * 16
    return symmetric_ring(group, window, device) if reach_each_other(group, device) else P2PRing(group)


def symmetric_ring(group: dist.ProcessGroup, window: int, device: torch.device) -> SymmetricRing:
    """A ring through peers' memory over `group`, all of whose devices reach each other. Every rank calls it, with an equal
    `window`, a multiple of 16 bytes."""
    mapped = map_regions(group, region_size(window, group.size()), device)
    ring = SymmetricRing(Memory(group.rank(), mapped.local, mapped.pointers, window))
    ring.handle = mapped.keep
    return ring


class SymmetricRing(PullRing):
    """`PullRing` over mapped memory."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.rank, self.ranks = memory.rank, len(memory.pointers)
        device = memory.local.device
        flags = memory.local[SLOTS * memory.window :].view(torch.int32)
        self.ready, self.taken = flags[: self.ranks], flags[self.ranks :]
        start = torch.tensor(memory.pointers, dtype=torch.int64, device=device)
        self.windows = start
        self.ready_at = start + SLOTS * memory.window
        self.taken_at = self.ready_at + self.ranks * _WORD
        self.epoch = 0
        self.readers: dict[int, int | None] = {}
        self.finished = torch.zeros(1, dtype=torch.int32, device=device)
        self.landing = [torch.empty(memory.window, dtype=torch.uint8, device=device) for _ in range(2)]
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.handle: Any = None

    def publish(self, message: Tensor, reader: int | None) -> int:
        words = _words(message)
        if words.numel() * _WORD > self.memory.window:
            raise PlanError(
                f"a message of {words.numel() * _WORD} bytes in a ring for {self.memory.window}",
                code="attention-kernel",
                legal="`open_ring` with the size of the largest message",
            )
        self.epoch += 1
        before = self.epoch - SLOTS
        if before > 0:
            whom = self.readers.pop(before)
            first, count = (0, self.ranks) if whom is None else (whom, 1)
            wait_kernel[(count,)](self.taken, first, self.rank, before)
        slot = self.memory.local.view(torch.int32)[self.epoch % SLOTS * self.memory.window // _WORD :]
        slot[: words.numel()].copy_(words)
        self.readers[self.epoch] = reader
        publish_kernel[(self.ranks,)](self.ready_at, self.rank, self.epoch)
        return self.epoch

    def pull(self, source: int, epoch: int, like: Tensor, landing: int) -> Coming:
        words = like.numel() * like.element_size() // _WORD
        space = self.landing[landing].view(torch.int32)[:words]
        with self._beside():
            pull_kernel[(_PROGRAMS,)](
                self.windows,
                source,
                epoch % SLOTS * self.memory.window // _WORD,
                space,
                words,
                self.ready,
                self.taken_at,
                self.rank,
                epoch,
                self.finished,
                BLOCK=_BLOCK,
            )
            arrived = self.side.record_event() if self.side is not None else None
        return _Pulled(space.view(like.dtype).view(like.shape), arrived)

    def _beside(self) -> AbstractContextManager[Any]:
        """On the stream of the copies, behind what was asked of the current one: what used the landing place is among it."""
        if self.side is None:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        return torch.cuda.stream(self.side)


class _Pulled(NamedTuple):
    """The place that a kernel copies a message to, and the event behind it (None: it has been copied)."""

    message: Tensor
    arrived: Any

    def wait(self) -> Tensor:
        if self.arrived is not None:
            torch.cuda.current_stream(self.message.device).wait_event(self.arrived)
        return self.message


class P2PRing:
    """`PeerRing` by send and receive: any backend, any number of nodes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()

    def share(self, message: Tensor) -> Iterator[tuple[int, Tensor]]:
        message = message.contiguous()
        coming = self._exchange(message, 1) if self.ranks > 1 else None
        yield self.rank, message
        for step in range(1, self.ranks):
            assert coming is not None
            received, works = coming
            coming = self._exchange(message, step + 1) if step + 1 < self.ranks else None
            for work in works:
                work.wait()
            yield (self.rank + step) % self.ranks, received

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[self.rank].clone(memory_format=torch.contiguous_format)
        for step in range(1, self.ranks):
            received, works = self._exchange(parts[(self.rank - step) % self.ranks].contiguous(), step)
            for work in works:
                work.wait()
            total += received
        return total

    def _exchange(self, message: Tensor, step: int) -> tuple[Tensor, list[Any]]:
        """Start to send `message` to the rank `step` before, and to receive that of the rank `step` behind."""
        received = torch.empty_like(message)
        to, source = (self.rank - step) % self.ranks, (self.rank + step) % self.ranks
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, message, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
            ]
        )
        return received, works


def _words(message: Tensor) -> Tensor:
    """A message as flat int32."""
    flat = message.contiguous().view(-1)
    if flat.numel() * flat.element_size() % _WORD:
        raise PlanError(
            f"a message of {flat.numel() * flat.element_size()} bytes", code="attention-kernel", legal="a multiple of 4"
        )
    return flat.view(torch.int32)


@triton.jit(do_not_specialize=["first", "rank", "epoch"])
def wait_kernel(flags, first, rank, epoch):
    """One program for each of the peers from `first` on, which ends when that peer's flag is `epoch` or more."""
    peer = first + tl.program_id(0)
    if peer != rank:
        await_flag(flags + peer, epoch)


@triton.jit(do_not_specialize=["rank", "epoch"])
def publish_kernel(ready_at, rank, epoch):
    """One program for each rank, which sets this rank's flag there."""
    flag = tl.load(ready_at + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    set_flag(flag + rank, epoch)


@triton.jit(do_not_specialize=["source", "rank", "epoch"])
def pull_kernel(
    windows, source, offset, out, words, ready, taken_at, rank, epoch, finished, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy `words` int32 from the window of `source` once it has published `epoch`; the last program says that it is done."""
    await_flag(ready + source, epoch)
    window = tl.load(windows + source).to(tl.pointer_type(tl.int32))
    # After the cast, which forgets what is known of alignment: without it a load is 2 bytes wide, not 16.
    window = tl.multiple_of(window, 16) + offset
    for start in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(window + at, mask=at < words), mask=at < words)
    tl.debug_barrier()
    before = tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(finished, 0)  # for the next pull, which is behind this one on the stream
        flag = tl.load(taken_at + source).to(tl.pointer_type(tl.int32))
        set_flag(flag + rank, epoch)
