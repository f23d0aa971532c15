"""What grouped matmuls launch, as values: which kernel, on how many programs, with which arguments. Made here, run by others.

Nothing here touches a device, so that what a GPU would run can be compiled and counted where there is none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshplan.kernels.experts.matmul import PLAIN, UNIT, UNIT_GRADIENTS, columns_kernel, rows_kernel, sums_kernel
from meshplan.kernels.experts.tiles import INTERPRETED, Kind, tiles_for
from meshplan.kernels.launch import Launch, Machine

_GROUP = 8
"""Tiles of rows that take the same columns of weights one after the other, while the cache has them."""
_KINDS: dict[int, Kind] = {PLAIN.value: "plain", UNIT.value: "unit", UNIT_GRADIENTS.value: "gradients"}


@dataclass(frozen=True)
class Groups:
    """How many rows each expert has, on the host; and what kernels read of it, on `device`."""

    counts: tuple[int, ...]
    device: torch.device

    @functools.cached_property
    def starts(self) -> Tensor:
        """int32 [E + 1]: first rows."""
        return self._there(_prefix(self.counts))

    def tiles(self, height: int) -> Tensor:
        """int32 [tiles, 3]: expert, first row and one past the last row of each tile of `height` rows."""
        made = self._made
        if height not in made:
            table = list(_tiles(self.counts, height))
            made[height] = self._there(table).view(len(table), 3)
        return made[height]

    @functools.cached_property
    def _made(self) -> dict[int, Tensor]:
        return {}

    def _there(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.device, non_blocking=True)

    @property
    def rows(self) -> float:
        """Of an expert, on average."""
        return sum(self.counts) / max(1, len(self.counts))


class Gather(NamedTuple):
    """Rows that are read through a table, perhaps while peers still write them.

    Attributes:
        index: int64 [N], the row to read for each row.
        flags: int32, one for `chunk` rows each, at least `epoch` once these are there; None: all are.
        spare: processors to leave to the kernel that sends meanwhile, which would otherwise not start.
    """

    index: Tensor
    flags: Tensor | None = None
    chunk: int = 1
    epoch: int = 0
    spare: int = 0


class Pair(NamedTuple):
    """How gate and up lie, and which unit they make."""

    interleaved: bool = False
    clamped: bool = False


def rows_launch(
    a: Tensor,
    weight: Tensor,
    turned: bool,
    groups: Groups,
    out: Tensor,
    machine: Machine,
    *,
    bias: Tensor | None = None,
    do: int = PLAIN.value,
    pair: Pair | None = None,
    h: Tensor | None = None,
    dh: Tensor | None = None,
    gather: Gather | None = None,
) -> Launch:
    """Rows times their experts' weights, `matmul.rows_kernel`.

    Arguments:
        a: [N, depth], or rows to `gather`; weight: [E, width, depth], turned [E, depth, width], width twice that of `out`
            for UNIT; out: [N, width].
    """
    pair = pair or Pair()
    depth, width = a.shape[1], out.shape[1]
    wide = do == UNIT.value and pair.interleaved
    tma = machine.hopper and _describable(weight)
    tma_a = tma and gather is None and _describable(a)
    tiles = INTERPRETED if machine.interpreted else tiles_for(_KINDS[do], a.element_size(), tma, groups.rows)
    columns = tiles.columns * (2 if wide else 1)
    block = [1, tiles.depth, columns] if turned else [1, columns, tiles.depth]
    table = groups.tiles(tiles.rows)
    arguments = {
        "a": _descriptor(a, [tiles.rows, tiles.depth]) if tma_a else a,
        "b": _descriptor(weight, block) if tma else weight,
        "bias": bias,
        "out": out,
        "h": h,
        "dh": dh,
        "index": None if gather is None else gather.index,
        "flags": None if gather is None else gather.flags,
        "tiles": table,
        "rows": a.shape[0],
        "row_tiles": table.shape[0],
        "depth": depth,
        "width": width,
        "a_row": a.stride(0),
        "b_e": weight.stride(0),
        "b_k": weight.stride(1 if turned else 2),
        "b_n": weight.stride(2 if turned else 1),
        "epoch": 0 if gather is None else gather.epoch,
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "GROUP": _GROUP,
        "TURNED": turned,
        "DO": do,
        "INTERLEAVED": pair.interleaved,
        "CLAMPED": pair.clamped,
        "CHUNK": 1 if gather is None else gather.chunk,
        "TMA_A": tma_a,
        "TMA_B": tma,
        **_numbers(a, machine),
    }
    most = max(1, machine.processors - (0 if gather is None else gather.spare))
    programs = min(most, table.shape[0] * triton.cdiv(width, tiles.columns))
    return Launch(rows_kernel, programs, arguments, tiles.warps, tiles.stages)


def sums_launch(a: Tensor, b: Tensor, groups: Groups, out: Tensor, machine: Machine) -> Launch:
    """Sums over each expert's rows, [N, height] and [N, width] -> [E, height, width]: `matmul.sums_kernel`."""
    height, width = out.shape[1:]
    tma = machine.hopper and _describable(a) and _describable(b)
    tiles = INTERPRETED if machine.interpreted else tiles_for("sums", a.element_size(), tma, groups.rows)
    count = out.shape[0] * triton.cdiv(height, tiles.rows) * triton.cdiv(width, tiles.columns)
    arguments = {
        "a": _descriptor(a, [tiles.depth, tiles.rows]) if tma else a,
        "b": _descriptor(b, [tiles.depth, tiles.columns]) if tma else b,
        "out": out,
        "starts": groups.starts,
        "tiles": count,
        "height": height,
        "width": width,
        "a_row": a.stride(0),
        "b_row": b.stride(0),
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "TMA": tma,
        **_numbers(a, machine),
    }
    return Launch(sums_kernel, min(machine.processors, count), arguments, tiles.warps, tiles.stages)


def columns_launch(x: Tensor, groups: Groups, out: Tensor, machine: Machine) -> Launch:
    """Sums of each expert's rows, [N, width] -> [E, width]: `matmul.columns_kernel`."""
    r, w = (16, 16) if machine.interpreted else (64, 128)
    arguments = {
        "x": x,
        "out": out,
        "starts": groups.starts,
        "width": x.shape[1],
        "x_row": x.stride(0),
        "R": r,
        "W": w,
        "WIDEN": machine.interpreted,
    }
    return Launch(columns_kernel, out.shape[0] * triton.cdiv(x.shape[1], w), arguments, 4, 2)


def _numbers(a: Tensor, machine: Machine) -> dict[str, Any]:
    precise = "tf32x3" if machine.tf32x3 and a.dtype == torch.float32 else "ieee"
    return {"WIDEN": machine.interpreted, "PRECISION": precise}


def _prefix(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _tiles(counts: Sequence[int], height: int) -> Any:
    start = 0
    for e, count in enumerate(counts):
        for row in range(start, start + count, height):
            yield e, row, min(row + height, start + count)
        start += count


def _describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can stand for `x`: 16-byte steps from a 16-byte boundary, and something in it."""
    steps = [s * x.element_size() for s in x.stride()[:-1]]
    return (
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and math.prod(x.shape) > 0
        and all(s > 0 and s % 16 == 0 for s in steps)
    )


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
