"""Which part of the full tensor a rank's shard is, as boxes with true offsets: what a checkpoint must know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshplan.errors import PlanError
from meshplan.runtime.comm import chunk_offset, chunk_sizes

# axis -> the sizes along the sharded dim of the fused parts (`q|k|v`) that are each split on their own
Parts = Mapping[str, Sequence[int]]
Interval = tuple[int, int]  # (first index, length), in the full tensor


@dataclass(frozen=True)
class Box:
    """A rectangular piece of the full tensor that this rank holds.

    Attributes:
        offset: first index on each dim, in the full tensor.
        size: extent on each dim.
        start: first index on each dim, in this rank's local tensor.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The view of this box in the rank's local tensor."""
        for dim, (first, length) in enumerate(zip(self.start, self.size, strict=True)):
            local = local.narrow(dim, first, length)
        return local


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself; detached and sharing memory, so writes are seen."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def boxes_of(name: str, tensor: Tensor, parts: Parts | None = None) -> list[Box]:
    """The boxes of the full tensor that this rank holds, in the order of its local tensor.

    A plain tensor, and an empty full tensor, is one box; an empty shard, or a rank outside the mesh, holds none. More
    than one box arises where `parts` (or an interleaving `_StridedShard`) make the shard non-contiguous.

    Arguments:
        name: the tensor's name, for errors.
        tensor: a DTensor with placements Shard, _StridedShard or Replicate on each axis, or a plain tensor.
        parts: for each axis that splits part by part, the parts' sizes along the sharded dim.

    Raises PlanError `partial-tensor` for a pending sum and `shard-extent` where the local shape is not the one that the
    placements imply: offsets would then be a guess, and a guess in a checkpoint is a permuted weight.
    """
    shape = tuple(tensor.shape)
    whole = Box((0,) * len(shape), shape, (0,) * len(shape))
    if not isinstance(tensor, DTensor) or math.prod(shape) == 0:
        return [whole]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    rows: list[list[Interval]] = [[(0, n)] for n in shape]
    for dim in range(len(shape)):
        for axis_index, split in _splits_of(name, tensor, dim):
            axis = _axis_name(tensor, axis_index)
            pieces = (parts or {}).get(axis) or split
            n, rank = tensor.device_mesh.size(axis_index), coordinate[axis_index]
            rows[dim] = _cut(name, axis, rows[dim], n, rank, pieces)
    local = tuple(local_part(tensor).shape)
    implied = tuple(sum(length for _, length in r) for r in rows)
    if local != implied:
        raise PlanError(
            f"{name}: this rank holds {list(local)} of {list(shape)}, but {tensor.placements} on mesh "
            f"{tuple(tensor.device_mesh.shape)} at {tuple(coordinate)} implies {list(implied)}",
            code="shard-extent",
            legal="shards as torch.chunk cuts them: ceil(size / degree) first",
        )
    return _boxes(rows)


def _axis_name(tensor: DTensor, index: int) -> str:
    names = tensor.device_mesh.mesh_dim_names
    return names[index] if names else str(index)


def _splits_of(name: str, tensor: DTensor, dim: int) -> list[tuple[int, int | None]]:
    """The mesh axes that split `dim`, in the order in which they cut it, each with a number of interleaved pieces.

    DTensor reads placements left to right; FSDP2 on top of TP cuts the other way round and says so by
    `_StridedShard(dim, split_factor)`: this axis cuts after axes to its right whose sizes multiply to `split_factor`.
    Reading the factor that way, rather than as an interleaving, is also right for uneven sizes, where DTensor's is not.
    """
    order: list[tuple[int, int | None]] = []
    for index in reversed(range(len(tensor.placements))):
        placement = tensor.placements[index]
        if isinstance(placement, Replicate):
            continue
        at = getattr(placement, "dim", None)
        if at is None:
            raise PlanError(
                f"{name} is {placement} on axis {_axis_name(tensor, index)}: its value is not yet known",
                code="partial-tensor",
                legal="parameters, buffers and optimizer state that are S(d) or R on every axis",
            )
        if at % tensor.ndim != dim:
            continue
        factor = getattr(placement, "split_factor", 1)
        sizes = [tensor.device_mesh.size(i) for i, _ in order]
        prefix = [math.prod(sizes[:i]) for i in range(len(sizes) + 1)]
        if factor in prefix:
            order.insert(prefix.index(factor), (index, None))
        else:
            order.insert(0, (index, factor))
    return order


def _cut(
    name: str, axis: str, rows: list[Interval], n: int, rank: int, pieces: Sequence[int] | int | None
) -> list[Interval]:
    """Shard `rank` of `n` of the concatenated intervals; with `pieces` (sizes, or how many), of each piece."""
    total = sum(length for _, length in rows)
    if pieces is None:
        pieces = [total]
    elif isinstance(pieces, int):
        pieces = chunk_sizes(total, pieces)
    if sum(pieces) != total:
        raise PlanError(
            f"{name}: parts {list(pieces)} on axis {axis} sum to {sum(pieces)}, the dim has {total}", code="bad-parts"
        )
    mine: list[Interval] = []
    first = 0
    for size in pieces:
        mine += _window(rows, first + chunk_offset(size, n, rank), chunk_sizes(size, n)[rank])
        first += size
    return mine


def _window(rows: list[Interval], first: int, length: int) -> list[Interval]:
    """Positions [first, first + length) of the concatenation of `rows`, joined where they touch."""
    out: list[Interval] = []
    position = 0
    for start, size in rows:
        low, high = max(first, position), min(first + length, position + size)
        if low < high:
            begin = start + low - position
            if out and sum(out[-1]) == begin:
                out[-1] = (out[-1][0], out[-1][1] + high - low)
            else:
                out.append((begin, high - low))
        position += size
    return out


def _boxes(rows: list[list[Interval]]) -> list[Box]:
    starts = [list(itertools.accumulate((length for _, length in r), initial=0)) for r in rows]
    return [
        Box(
            tuple(r[i][0] for r, i in zip(rows, at, strict=True)),
            tuple(r[i][1] for r, i in zip(rows, at, strict=True)),
            tuple(s[i] for s, i in zip(starts, at, strict=True)),
        )
        for at in itertools.product(*(range(len(r)) for r in rows))
    ]
