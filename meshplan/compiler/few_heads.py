"""Fewer heads than ranks: when a split projection is viewed as heads that its axis outnumbers, each head is copied to the
neighbouring ranks that need it.

The axis is then seen as two, heads x copies: `tp` of 4 over 2 key heads is `tp_kv` 2 x `tp_rep` 2, and the projection's weight is
sharded on the first and replicated on the second, where its gradient is summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from meshplan.compiler.bind import BoundParam
from meshplan.compiler.kinds import Kind
from meshplan.compiler.layout import Axis
from meshplan.compiler.rules.views import dim_groups
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.patterns import generic
from meshplan.plan.placements import Shard
from meshplan.runtime.comm import chunk_sizes

VIEWS = frozenset({"view", "reshape", "unflatten"})


@dataclass(frozen=True)
class Split:
    """`axis` becomes `pieces` x copies for the parameters named."""

    axis: str
    pieces: int
    params: frozenset[str]


class SplitNeeded(Exception):
    """Propagation met a view as heads that are fewer than the axis's ranks."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.split = split


def needed(name: str, x: Tensor, out: Tensor, kind: Kind, axis: Axis, source: frozenset[str]) -> Split | None:
    """The split that lets this rank's call run as it stands, or None.

    Arguments:
        name: of the torch call; x, out: its input and output at global shape.
        kind: of the input on `axis`.
        source: the sharded parameters that `x` has its shards from.
    """
    if not axis.copies or axis.data or name not in VIEWS:
        return None
    if not source or not isinstance(kind, Shard) or kind.parts or kind.copies > 1:
        return None
    for left, right in dim_groups(tuple(x.shape), tuple(out.shape)) or []:
        heads = out.shape[right[0]]
        if left == [kind.dim] and len(right) > 1 and 1 < heads < axis.degree and axis.degree % heads == 0:
            return Split(axis.name, heads, source)
    return None


def sub_axes(axis: str) -> tuple[str, str]:
    """Names of the two axes that a split axis becomes: over heads, and over copies of one head."""
    return f"{axis}_kv", f"{axis}_rep"


def split_spec(
    spec: MeshSpec, kinds: Mapping[str, list[Kind]], axes: list[Axis], params: Mapping[str, BoundParam]
) -> MeshSpec | None:
    """`spec` with every axis on which some parameter has copies seen as two; None where an axis cuts another parameter
    unevenly or part by part, since the two axes in turn would cut it elsewhere."""
    for k, axis in enumerate(axes):
        copies = {kind[k].copies for kind in kinds.values() if isinstance(kind[k], Shard)} - {1}  # type: ignore[union-attr]
        if copies:
            (n,) = copies
            pieces, rest = sub_axes(axis.name)
            spec = spec.split_axis(axis.name, {pieces: axis.degree // n, rest: n})
            for name, own in kinds.items():
                shard = own[k]
                if isinstance(shard, Shard) and not _cut_alike(
                    shard, params[name].shape[shard.dim], axis.degree // n, n
                ):
                    return None
    return spec


def _cut_alike(shard: Shard, size: int, pieces: int, copies: int) -> bool:
    """Whether the two axes in turn cut a dim of `size` as the whole axis does at once."""
    if shard.copies > 1:
        return size % pieces == 0
    in_turn = [part for piece in chunk_sizes(size, pieces) for part in chunk_sizes(piece, copies)]
    return shard.parts is None and in_turn == chunk_sizes(size, pieces * copies)


def with_copies(
    kinds: Mapping[str, list[Kind]], split: Split, axes: list[Axis], params: Mapping[str, BoundParam]
) -> dict[str, list[Kind]]:
    """Kinds of all parameters after `split`. What holds for a projection holds for its namesakes in the other layers."""
    k = next(i for i, axis in enumerate(axes) if axis.name == split.axis)
    out = {name: list(own) for name, own in kinds.items()}
    alike = {(generic(name), params[name].shape, kinds[name][k]) for name in split.params}
    for name in out:
        kind = out[name][k]
        if isinstance(kind, Shard) and (generic(name), params[name].shape, kind) in alike:
            out[name][k] = replace(kind, copies=axes[k].degree // split.pieces)
    return out
