"""The memory in which ranks of one node exchange rows: where what lies in a rank's region, and who may write it when.

    told       counts of every rank, two slots by turns            inbox      rows from all ranks, block by block, in rank order
    choices    local expert and weight of each inbox row           outbox     what goes back for each inbox row

A source's block in an inbox begins at a multiple of `chunk` rows, and rows are announced by the chunk. Flags hold the number of
the exchange that they last served, so they only grow:

    heard[s]     rank s has told its counts                        arrived[c]  chunk c of the inbox is here
    freed[d]     rank d has used what it got in its inbox           chosen[c]  the same of its choices
    done[d, c]   chunk c of what this rank sent to d is answered   pulled[s]   rank s has fetched its answers from here

A rank writes into an inbox once its owner has freed the exchange before, and an owner writes its outbox once everyone has
pulled from it: no exchange overwrites what another still reads. Told slots need no flag: a rank tells again after it has heard
what everyone told last, and whoever told that had read the slot before it, which is the one that is written now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.peers import map_regions, reach_each_other

_SLOTS = 2
_ALIGN = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a region is made for. All ranks have the same.

    Attributes:
        ranks, experts: of all of them.
        tokens: the most of one rank; k: the most choices of a token; row_bytes: of the widest row.
        capacity: rows that an inbox holds; by default as many as can come: every token of every rank.
        chunk: rows that are announced together.
        weight_bytes: 4, or 8 for float64.
    """

    ranks: int
    experts: int
    tokens: int
    k: int
    row_bytes: int
    capacity: int = 0
    chunk: int = 32
    weight_bytes: int = 4

    @cached_property
    def chunks_sent(self) -> int:
        """The most chunks from one rank to another."""
        return max(1, -(-self.tokens // self.chunk))

    @cached_property
    def chunks(self) -> int:
        """Of an inbox."""
        return -(-self.capacity // self.chunk) if self.capacity else self.ranks * self.chunks_sent

    @cached_property
    def pitch(self) -> int:
        """Bytes from row to row."""
        return _aligned(self.row_bytes)

    @cached_property
    def words(self) -> int:
        """int32 that a rank tells: its status, rows for each rank, choices of each expert."""
        return 1 + self.ranks + self.experts

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """First byte and bytes of each part of a region."""
        rows = self.chunks * self.chunk
        n = self.ranks
        sizes = {
            "heard": 4 * n,
            "freed": 4 * n,
            "pulled": 4 * n,
            "arrived": 4 * self.chunks,
            "chosen": 4 * self.chunks,
            "done": 4 * n * self.chunks_sent,
            "told": 4 * _SLOTS * n * self.words,
            "choices": 4 * rows * self.k,
            "weights": self.weight_bytes * rows * self.k,
            "answer_weights": self.weight_bytes * rows * self.k,
            "inbox": rows * self.pitch,
            "outbox": rows * self.pitch,
        }
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = (at, size)
            at += _aligned(size)
        return found

    @property
    def region(self) -> int:
        """Bytes of a rank's region."""
        at, size = self.fields["outbox"]
        return at + _aligned(size)


class Window:
    """Regions of all ranks as one process sees them, and the count of exchanges.

    A process holds one rank, or several, or all: *logical ranks*, whose kernels it launches one after the other. All ranks make
    the same calls in the same order.
    """

    def __init__(self, sizes: Sizes, regions: Mapping[int, Tensor], pointers: Sequence[int], keep: Any = None) -> None:
        """`regions`: uint8, of the ranks that are held, zero at first; `pointers`: addresses of all ranks' regions here; `keep`:
        what has to live as long as these."""
        self.sizes, self.regions, self.keep = sizes, dict(regions), keep
        self.held = sorted(regions)
        self.device = self.regions[self.held[0]].device
        start = torch.tensor(pointers, dtype=torch.int64)
        self._addresses = {name: (start + at).to(self.device) for name, (at, _) in sizes.fields.items()}
        self.told = self.pushed = self.answered = 0
        self.tell: Callable[[str, Tensor], None] = lambda op, rows: None  # hears of what leaves the one rank that is held
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def at(self, name: str) -> Tensor:
        """int64 [ranks]: the address of a part in each rank's region."""
        return self._addresses[name]

    def mine(self, rank: int, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        """A part of a region that is held, flat."""
        at, size = self.sizes.fields[name]
        return self.regions[rank][at : at + size].view(dtype)

    def rows(self, rank: int, name: str, dtype: torch.dtype, width: int) -> Tensor:
        """`inbox` or `outbox` as [capacity, width], rows a pitch apart."""
        flat = self.mine(rank, name, dtype).view(-1, self.sizes.pitch // dtype.itemsize)
        return flat[:, :width]

    def slot(self, rank: int) -> Tensor:
        """int32 [ranks, words]: what was told last."""
        n = self.sizes.ranks
        return self.mine(rank, "told").view(_SLOTS, n, self.sizes.words)[self.told % _SLOTS]


def logical(sizes: Sizes, device: torch.device | str = "cpu") -> Window:
    """All ranks in this process."""
    regions = {r: torch.zeros(sizes.region, dtype=torch.uint8, device=device) for r in range(sizes.ranks)}
    return Window(sizes, regions, [region.data_ptr() for region in regions.values()])


def open_window(group: dist.ProcessGroup, sizes: Sizes, device: torch.device) -> Window:
    """A window of the ranks of `group`, which are one node's GPUs. Every rank calls it, with the same `sizes`.

    Raises:
        PlanError: `experts-fused`, on all ranks, where they cannot reach each other's memory.
    """
    if not reach_each_other(group, device):
        raise PlanError(
            f"fused experts need GPUs of one node that reach each other's memory; the {group.size()} ranks have none",
            code="experts-fused",
            legal="dispatch: alltoall, allgather",
        )
    mapped = map_regions(group, sizes.region, device)
    return Window(sizes, {group.rank(): mapped.local}, mapped.pointers, mapped.keep)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
