"""Tile sizes, warps and pipeline stages of the grouped matmuls, by machine and by what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "unit", "gradients", "sums"]


@dataclass(frozen=True)
class Tiles:
    """`rows` x `columns` of a result at a time, `depth` products deep, by `warps` warps, with `stages` loads under way.

    Of the unit `columns` are those of its value: gate and up are twice as many. Of sums over rows `rows` are the result's too.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# `benchmarks/experts_compile.py` compiles all of them, and fails where one of 16-bit inputs spills a register.
_HOPPER: dict[Kind, Tiles] = {
    "plain": Tiles(128, 256, 64, 8, 4),
    "unit": Tiles(128, 128, 64, 8, 4),
    "gradients": Tiles(128, 128, 64, 8, 4),
    "sums": Tiles(128, 256, 64, 8, 4),
}

# Where experts have few rows, each: half of a tile would be empty.
_HOPPER_FEW: dict[Kind, Tiles] = {
    "plain": Tiles(64, 256, 64, 4, 4),
    "unit": Tiles(64, 128, 64, 4, 4),
    "gradients": Tiles(64, 128, 64, 4, 4),
    "sums": Tiles(128, 256, 64, 8, 4),
}
_FEW = 64

# By pointers, on any GPU: within the 99 KiB of shared memory of compute capability 8.6.
_ANY: dict[Kind, Tiles] = {
    "plain": Tiles(64, 128, 32, 4, 3),
    "unit": Tiles(64, 64, 32, 4, 3),
    "gradients": Tiles(64, 64, 32, 4, 3),
    "sums": Tiles(64, 128, 32, 4, 3),
}

# float32 inputs. Three products of tf32 for one hold operands in registers: right, not fast.
_FLOAT32: dict[Kind, Tiles] = {
    "plain": Tiles(64, 64, 32, 4, 2),
    "unit": Tiles(64, 32, 32, 4, 2),
    "gradients": Tiles(64, 32, 32, 4, 2),
    "sums": Tiles(64, 64, 32, 4, 2),
}

INTERPRETED = Tiles(16, 16, 16, 1, 1)
"""The interpreter's cost is by the tile; these are small enough for small tests to have several."""


def tiles_for(kind: Kind, itemsize: int, tma: bool, rows: float) -> Tiles:
    """The configuration of a kernel for experts that have `rows` rows each on average."""
    if itemsize > 2:
        return _FLOAT32[kind]
    return (_HOPPER_FEW if rows <= _FEW else _HOPPER)[kind] if tma else _ANY[kind]
