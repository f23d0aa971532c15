"""Slots sorted by expert: histogram, exclusive prefix sums, and the place of every slot, by a counting sort without atomics.

    count    block b of slots, expert e:  table[b, e] = how many of the block chose e
    scan     table[b, e] = how many of the blocks before b did; totals[e] = how many at all
    settle   a slot's place = slots of experts before + those of its expert in blocks before + those before it in its block

Each block owns what it writes, so the order is that of slots within each expert, and the same at every run. The functions
are those of `meshplan.ops.experts.routing`, with its names and, bit for bit, its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshplan.kernels.experts.numbers import machine_of
from meshplan.kernels.launch import Launch, Machine
from meshplan.ops.experts.routing import Pairs

_COLUMNS = 16
"""Experts that a program of `scan` takes."""
_BLOCKS = 64
"""Blocks that it takes at a time."""
_ROWS = 1024
"""Slots a program of `tables` takes."""


class Sorted(NamedTuple):
    """Sorted slots of S = M k.

    Attributes:
        slots: int64 [S], in the order of their keys, those with no expert last.
        counts: int64 [experts].
        starts: int32 [experts + 1], the exclusive prefix sums of the counts; the last is N, how many have an expert.
        place: int64 [S], where each slot stands among the sorted; N for those with no expert.
    """

    slots: Tensor
    counts: Tensor
    starts: Tensor
    place: Tensor


def sort(keys: Tensor, experts: int) -> Sorted:
    """Slots in the order of their keys.

    Arguments:
        keys: integers [M, k] of 32 or 64 bits; those outside [0, experts) have no expert.
    """
    machine = machine_of(keys.device)
    found = _empty(keys, experts)
    for launch in sort_launches(keys, experts, found, machine):
        launch.run()
    return found


def sorted_slots(keys: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """`routing.sorted_slots`: int64 [M k] and int64 [experts]."""
    found = sort(keys, experts)
    return found.slots, found.counts


def pairs_of(slots: Tensor, n: int, k: int) -> Pairs:
    """`routing.pairs_of`: the first `n` of the sorted slots of M rows with k each."""
    machine_of(slots.device)
    size = slots.shape[0]
    rows, place = slots.new_empty(n), slots.new_empty(size)
    tables_launch(slots, n, k, rows, place).run()
    return Pairs(rows, slots[:n], place.view(-1, k), n == size)


def _empty(keys: Tensor, experts: int) -> Sorted:
    def new(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=keys.device)

    return Sorted(new(keys.numel()), new(experts), new(experts + 1, torch.int32), new(keys.numel()))


def sort_launches(keys: Tensor, experts: int, out: Sorted, machine: Machine) -> Iterator[Launch]:
    """The three kernels, into `out`."""
    flat = keys.contiguous().view(-1)
    size, block = flat.numel(), 16 if machine.interpreted else 128
    # Two columns more: slots with no expert, and places of the last block that hold no slot.
    columns = max(_COLUMNS, triton.next_power_of_2(experts + 2))
    blocks = max(1, triton.cdiv(size, block))
    table = torch.empty(blocks, columns, dtype=torch.int32, device=keys.device)
    totals = torch.empty(columns, dtype=torch.int32, device=keys.device)
    shared = {"keys": flat, "table": table, "size": size, "experts": experts, "B": block, "C": columns}
    yield Launch(count_kernel, blocks, shared, 4, 1)
    scan = {"table": table, "totals": totals, "blocks": blocks, "C": columns, "R": _BLOCKS, "W": _COLUMNS}
    yield Launch(scan_kernel, columns // _COLUMNS, scan, 4, 1)
    yield Launch(settle_kernel, blocks, {**shared, **out._asdict(), "totals": totals}, 4, 1)


def tables_launch(slots: Tensor, n: int, k: int, rows: Tensor, place: Tensor) -> Launch:
    """The row of each of the first `n` slots, and the place of all."""
    arguments = {"slots": slots, "rows": rows, "place": place, "size": slots.shape[0], "n": n, "k": k, "B": _ROWS}
    return Launch(tables_kernel, triton.cdiv(slots.shape[0], _ROWS), arguments, 4, 1)


@triton.jit
def _keys(keys, at, size, experts):
    """Keys of slots `at`: `experts` for no expert, one more for no slot."""
    key = tl.load(keys + at, mask=at < size, other=-1)
    key = tl.where((key >= 0) & (key < experts), key, experts).to(tl.int32)
    return tl.where(at < size, key, experts + 1)


@triton.jit(do_not_specialize=["size", "experts"])
def count_kernel(keys, table, size, experts, B: tl.constexpr, C: tl.constexpr):
    """The histogram of one block."""
    b = tl.program_id(0)
    key = _keys(keys, b * B + tl.arange(0, B), size, experts)
    tl.store(table + b * C + tl.arange(0, C), tl.histogram(key, C).to(tl.int32))


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(table, totals, blocks, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Exclusive prefix sums down W columns of the table, and what they end with."""
    column = tl.program_id(0) * W + tl.arange(0, W)
    total = tl.zeros([W], tl.int32)
    for start in range(0, blocks, R):
        row = start + tl.arange(0, R)
        here = table + row[:, None] * C + column[None, :]
        x = tl.load(here, mask=(row < blocks)[:, None], other=0)
        tl.store(here, tl.cumsum(x, 0) - x + total[None, :], mask=(row < blocks)[:, None])
        total += tl.sum(x, 0)
    tl.store(totals + column, total)


@triton.jit(do_not_specialize=["size", "experts"])
def settle_kernel(
    keys, table, totals, slots, counts, starts, place, size, experts, B: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Where each slot of one block stands."""
    b = tl.program_id(0)
    e = tl.arange(0, C)
    total = tl.load(totals + e)
    start = tl.cumsum(total, 0) - total
    n = tl.sum(tl.where(e < experts, total, 0), 0)
    if b == 0:
        tl.store(counts + e, total.to(tl.int64), mask=e < experts)
        tl.store(starts + e, start, mask=e <= experts)
    i = tl.arange(0, B)
    at = b * B + i
    key = _keys(keys, at, size, experts)
    before = (key[:, None] == key[None, :]) & (i[None, :] < i[:, None])
    where = tl.gather(start, key, 0) + tl.load(table + b * C + key) + tl.sum(before.to(tl.int32), 1)
    tl.store(slots + where, at.to(tl.int64), mask=at < size)
    tl.store(place + at, tl.where(key < experts, where, n).to(tl.int64), mask=at < size)


@triton.jit(do_not_specialize=["size", "n"])
def tables_kernel(slots, rows, place, size, n, k, B: tl.constexpr):
    """Row and place of B sorted slots."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    slot = tl.load(slots + at, mask=at < size, other=0)
    tl.store(rows + at, slot // k, mask=at < n)
    tl.store(place + slot, tl.where(at < n, at, n).to(tl.int64), mask=at < size)
