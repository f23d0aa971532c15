"""Tile sizes, warps and pipeline stages of each kernel, by head dim and machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "dkdv", "dk", "dv", "dq"]


@dataclass(frozen=True)
class Machine:
    """What a kernel is compiled for.

    Attributes:
        hopper: compute capability 9: wgmma, tensor descriptors and 227 KiB of shared memory a block.
        interpreted: no machine at all: Triton's interpreter, on CPU tensors.
        tf32x3: float32 products by three tensor-core products, which keep float32's precision.
    """

    hopper: bool = False
    interpreted: bool = False
    tf32x3: bool = False


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


# By the larger of the head dims of keys and values, in 16-bit inputs. `benchmarks/attention_compile.py` compiles all of
# them: none spills a register.
_HOPPER: dict[Kind, dict[int, Tiles]] = {
    "forward": {
        64: Tiles(128, 128, 8, 3),
        96: Tiles(128, 64, 8, 3),
        128: Tiles(128, 64, 8, 3),
        192: Tiles(128, 64, 8, 2),
        256: Tiles(128, 64, 8, 2),
    },
    "dkdv": {64: Tiles(64, 128, 8, 3), 96: Tiles(64, 64, 8, 2), 128: Tiles(64, 128, 8, 2), 192: Tiles(32, 64, 8, 2)},
    "dk": {256: Tiles(32, 64, 8, 2)},
    "dv": {256: Tiles(32, 64, 8, 2)},
    "dq": {
        64: Tiles(128, 64, 8, 3),
        96: Tiles(128, 64, 8, 2),
        128: Tiles(128, 64, 8, 2),
        192: Tiles(64, 64, 8, 2),
        256: Tiles(64, 32, 8, 2),
    },
}

# Any other GPU: within the 99 KiB of shared memory of compute capability 8.6.
_ANY: dict[Kind, dict[int, Tiles]] = {
    "forward": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2)},
    "dkdv": {64: Tiles(32, 64, 4, 2), 128: Tiles(32, 32, 4, 2)},
    "dk": {256: Tiles(16, 32, 4, 2)},
    "dv": {256: Tiles(16, 32, 4, 2)},
    "dq": {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(32, 16, 4, 2)},
}

# float32 inputs take twice the room.
_FLOAT32: dict[Kind, dict[int, Tiles]] = {
    "forward": {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 1)},
    "dkdv": {64: Tiles(32, 32, 4, 2), 128: Tiles(16, 32, 4, 1)},
    "dk": {256: Tiles(16, 16, 4, 1)},
    "dv": {256: Tiles(16, 16, 4, 1)},
    "dq": {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
}

_INTERPRETED = Tiles(16, 16, 1, 1)


def tiles_for(kind: Kind, dim: int, itemsize: int, machine: Machine) -> Tiles:
    """The configuration of a kernel at head dim `dim`: of the least dim in its table that covers it."""
    if machine.interpreted:
        return _INTERPRETED
    table = (_FLOAT32 if itemsize > 2 else _HOPPER if machine.hopper else _ANY)[kind]
    return table[min(covers)] if (covers := [d for d in table if d >= dim]) else table[max(table)]


def splits_backward(dim: int) -> bool:
    """Whether dk and dv take a kernel each: together they do not fit into the registers."""
    return dim > 192
