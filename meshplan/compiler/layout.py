"""Layouts while compiling: the axes in play, what one tensor is on each, and the local shapes that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshplan.compiler.kinds import Kind
from meshplan.plan.placements import Shard
from meshplan.runtime.comm import AxisGroup, chunk_size


@dataclass(frozen=True)
class Axis:
    """One mesh axis of degree > 1, as the traced rank sees it."""

    name: str
    group: AxisGroup
    data: bool  # dp_replicate, dp_shard, cp: gradients are averaged over it, outputs stay sharded on it
    copies: bool = True  # whether heads that are fewer than its ranks are copied to several; else they are gathered

    @property
    def degree(self) -> int:
        return self.group.size


@dataclass
class Info:
    """What the compiler knows of one tensor of the lowered program: which value of the single-device program it is, its
    kind on each axis, whether it depends on the model's inputs, and the parameter it is, if it is one. `source` names the
    sharded parameters that gave it its shards; `also` are other values that it counts as, with its kinds as those."""

    value: int
    kinds: list[Kind]
    data: bool
    param: str | None = None
    source: frozenset[str] = frozenset()
    also: dict[int, list[Kind]] = field(default_factory=dict)


def local_dim(
    size: int, dim: int, kinds: Sequence[Kind], axes: Sequence[Axis], coords: Sequence[int] | None = None
) -> int:
    """Length of this rank's part of a dim of `size`, split by every axis sharded on it, outermost first."""
    for k, axis in enumerate(axes):
        kind = kinds[k]
        if isinstance(kind, Shard) and kind.dim == dim:
            at = axis.group.rank if coords is None else coords[k]
            pieces = kind.parts if kind.parts and sum(kind.parts) == size else (size,)
            size = sum(chunk_size(piece, axis.degree // kind.copies, at // kind.copies) for piece in pieces)
    return size


def local_shape(shape: Sequence[int], kinds: Sequence[Kind], axes: Sequence[Axis]) -> tuple[int, ...]:
    """This rank's shape of a tensor of global `shape`."""
    return tuple(local_dim(size, d, kinds, axes) for d, size in enumerate(shape))


def axis_size(shape: Sequence[int], dim: int, kinds: Sequence[Kind], axes: Sequence[Axis], upto: int) -> int:
    """Length of `dim` before axis number `upto` splits it: the global length as that axis's collectives see it."""
    return local_dim(shape[dim], dim, kinds[:upto], axes[:upto])
