"""Tile sizes, warps and pipeline stages of each kernel, by head dim and machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "dkdv", "dk", "dv", "dq"]


@dataclass(frozen=True)
class Tiles:
    """`queries` x `keys` scores at a time, by `warps` warps, with `stages` tiles of the walked side under way."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Width:
    """A head dim as one or two powers of two that cover it: 128 = 128 + 0, 80 = 64 + 16, 192 = 128 + 64, 72 < 64 + 16."""

    main: int
    rest: int

    @property
    def total(self) -> int:
        return self.main + self.rest


def width_of(dim: int) -> Width:
    """The cheapest cover of `dim`. A part is 16 wide at least: the tensor core's step along the head dim."""
    main = max(16, 1 << (dim.bit_length() - 1))
    if main >= dim:
        return Width(main, 0)
    rest = max(16, 1 << (dim - main - 1).bit_length())
    return Width(main * 2, 0) if rest >= main else Width(main, rest)


# By the larger of the head dims of keys and values. `benchmarks/attention_compile.py` compiles all of them, and fails where
# one of 16-bit inputs spills a register. Through tensor descriptors, on Hopper:
_HOPPER: dict[Kind, dict[int, Tiles]] = {
    "forward": {
        64: Tiles(128, 128, 8, 3),
        96: Tiles(128, 128, 8, 2),
        128: Tiles(128, 128, 8, 2),
        192: Tiles(128, 64, 8, 2),
        256: Tiles(128, 64, 8, 2),
    },
    "dkdv": {64: Tiles(64, 128, 8, 3), 96: Tiles(64, 128, 8, 3), 128: Tiles(64, 128, 8, 2), 192: Tiles(64, 64, 8, 2)},
    "dk": {256: Tiles(64, 64, 8, 2)},
    "dv": {256: Tiles(64, 128, 8, 2)},
    "dq": {
        64: Tiles(128, 128, 8, 2),
        96: Tiles(128, 128, 8, 2),
        128: Tiles(128, 64, 8, 2),
        192: Tiles(128, 64, 8, 2),
        256: Tiles(128, 32, 8, 2),
    },
}

# The same where documents are compared, which takes registers: what differs.
_HOPPER_DOCUMENTS: dict[Kind, dict[int, Tiles]] = {"dk": {256: Tiles(32, 64, 8, 2)}, "dq": {256: Tiles(64, 64, 8, 2)}}

# By pointers, on any GPU: within the 99 KiB of shared memory of compute capability 8.6.
_ANY: dict[Kind, dict[int, Tiles]] = {
    "forward": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 8, 2)},
    "dkdv": {96: Tiles(32, 64, 4, 2), 128: Tiles(32, 32, 4, 2), 192: Tiles(16, 32, 4, 2)},
    "dk": {192: Tiles(32, 32, 8, 2), 256: Tiles(16, 32, 4, 2)},
    "dv": {192: Tiles(32, 32, 8, 2), 256: Tiles(16, 32, 4, 2)},
    "dq": {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(32, 16, 4, 2)},
}

# float32 inputs, by pointers or not. Three products of tf32 for one hold operands in registers, and spill: right, not fast.
_FLOAT32: dict[Kind, dict[int, Tiles]] = {
    "forward": {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 2)},
    "dkdv": {64: Tiles(32, 32, 4, 2), 192: Tiles(16, 16, 4, 2)},
    "dk": {256: Tiles(16, 16, 4, 2)},
    "dv": {256: Tiles(16, 16, 4, 2)},
    "dq": {64: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 2)},
}

INTERPRETED = Tiles(16, 16, 1, 1)
"""The interpreter's cost is by the tile; these are small enough for small tests to have several."""


def tiles_for(kind: Kind, dim: int, itemsize: int, documents: bool, tma: bool) -> Tiles:
    """The configuration of a kernel at head dim `dim`: that of the least dim in its table that covers it."""
    table = (_FLOAT32 if itemsize > 2 else _HOPPER if tma else _ANY)[kind]
    covers = min((covered for covered in table if covered >= dim), default=max(table))
    if documents and table is _HOPPER[kind]:
        return _HOPPER_DOCUMENTS.get(kind, table).get(covers, table[covers])
    return table[covers]


def splits_backward(columns: int) -> bool:
    """Whether dk and dv, `columns` wide together, take a kernel each: they do not fit into the registers at once."""
    return columns > 320
