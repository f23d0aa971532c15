"""Changes of layout on one axis, each a pair: what it does forward and what its mate does to the gradient.

Drawn for two ranks holding shards a, b of a value, or summands p, q:

    move          forward                      backward (gradient of the result -> gradient of the input)
    S(d) -> R     all_gather      a|b  a|b     reduce_scatter   (each rank's gradient is a partial sum)
    S(d) -> I     all_gather      a|b  a|b     slice            (the gradient is equal on all ranks)
    P -> I        all_reduce      p+q  p+q     identity
    P -> R        all_reduce      p+q  p+q     all_reduce
    P -> S(d)     reduce_scatter               all_gather
    I -> R        identity                     all_reduce
    R -> I        identity                     kept on rank 0, zero elsewhere (so that the sum counts it once)
    I -> S(d)     slice                        all_gather
    R -> S(d)     slice                        pad with zeros
    N -> S(d)     slice                        none
    I -> P        kept on rank 0, zero elsewhere   identity
    R -> P        kept on rank 0, zero elsewhere   kept on rank 0, zero elsewhere
    N -> P        kept on rank 0, zero elsewhere   none
    P -> A        times n                      times n          (a sum seen as a mean over the axis)
    A -> I        all_reduce / n               divided by n

Gradients are summed over tp and *averaged* over data axes (dp_replicate, dp_shard, cp). So on a data axis a rank's own share
of a gradient, that of an S, P, A or R value, is kept times n, while that of an I value, being whole, is not. A move into I
there multiplies its mate by n, and a move out of I divides it by n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.plan.placements import Mirrored
from meshplan.runtime.comm import AxisGroup, chunk_offset, chunk_sizes

# A pair of functions (x, group, dim, size) -> tensor, where size is the global length of `dim`.
Half = Callable[[Tensor, AxisGroup, int, int], Tensor]


def _identity(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return x.view_as(x)


def _all_gather(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return g.all_gather(x, dim, size)


def _reduce_scatter(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return g.reduce_scatter(x, dim)


def _all_reduce(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return g.all_reduce(x)


def _slice(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return g.shard(x, dim).contiguous()


def _pad(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    full = x.new_zeros(shape)
    full.narrow(dim, chunk_offset(size, g.size, g.rank), chunk_sizes(size, g.size)[g.rank]).copy_(x)
    return full


def _first(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return x.view_as(x) if g.rank == 0 else torch.zeros_like(x)


def _times_n(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return x * g.size


def _over_n(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return x / g.size


def _mean(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
    return g.all_reduce(x) / g.size


MOVES: dict[tuple[str, str], tuple[Half, Half]] = {
    ("S", "R"): (_all_gather, _reduce_scatter),
    ("S", "I"): (_all_gather, _slice),
    ("S", "N"): (_all_gather, _slice),
    ("P", "I"): (_all_reduce, _identity),
    ("P", "N"): (_all_reduce, _identity),
    ("P", "R"): (_all_reduce, _all_reduce),
    ("P", "S"): (_reduce_scatter, _all_gather),
    ("I", "R"): (_identity, _all_reduce),
    ("R", "I"): (_identity, _first),
    ("I", "S"): (_slice, _all_gather),
    ("R", "S"): (_slice, _pad),
    ("N", "S"): (_slice, _pad),
    ("I", "P"): (_first, _identity),
    ("R", "P"): (_first, _first),
    ("N", "P"): (_first, _first),
    ("P", "A"): (_times_n, _times_n),
    ("A", "I"): (_mean, _over_n),
    ("A", "N"): (_mean, _over_n),
}


def halves(src: str, dst: str, group: AxisGroup, parts: tuple[int, ...] | None = None) -> tuple[Half, Half]:
    """The two halves of a move over `group`: as in `MOVES`, scaled between a rank's share and a whole gradient if it
    averages. `parts` are the sizes along the sharded dim that are each cut on their own, and divide by the group."""
    forward, backward = MOVES[src, dst]
    if parts and "S" in (src, dst):
        forward, backward = _in_parts(forward, parts, src == "S"), _in_parts(backward, parts, dst == "S")
    if not group.averages or (src == "I") == (dst == "I"):
        return forward, backward
    scale = float(group.size) if dst == "I" else 1 / group.size

    def scaled(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
        return backward(x, g, dim, size) * scale

    return forward, scaled


def _in_parts(half: Half, parts: tuple[int, ...], joins: bool) -> Half:
    """`half` on a dim of fused parts: ranks hold a piece of each part, so the whole is put in order after it was joined, or
    before it is cut."""

    def run(x: Tensor, g: AxisGroup, dim: int, size: int) -> Tensor:
        if joins:
            by_rank = half(x, g, dim, size).unflatten(dim, (g.size, -1))
            pieces = _dealt(by_rank.split([p // g.size for p in parts], dim + 1), parts, dim)
            return torch.cat([piece.flatten(dim, dim + 1) for piece in pieces], dim)
        by_part = _dealt([piece.unflatten(dim, (g.size, -1)) for piece in x.split(list(parts), dim)], parts, dim)
        return half(torch.cat(by_part, dim + 1).flatten(dim, dim + 1), g, dim, size)

    return run


def _dealt(pieces: Sequence[Tensor], parts: tuple[int, ...], dim: int) -> list[Tensor]:
    """Pieces with the ranks on `dim`, those of mirrored parts turned from their order in the whole to that of the ranks, or
    back."""
    turned = isinstance(parts, Mirrored)
    return [piece.flip(dim) if turned and k % 2 else piece for k, piece in enumerate(pieces)]


_COLLECTIVE: dict[Half, str] = {
    _all_gather: "all_gather",
    _reduce_scatter: "reduce_scatter",
    _all_reduce: "all_reduce",
    _mean: "all_reduce",
}


def collectives_of(src: str, dst: str) -> tuple[str | None, str | None]:
    """The collective that a move makes forward and the one its mate makes backward, None for none."""
    forward, backward = MOVES[src, dst]
    return _COLLECTIVE.get(forward), _COLLECTIVE.get(backward)


class BoundMove:
    """A move with everything but the tensor settled, made once and called at every step; see `move`."""

    __slots__ = ("back", "dim", "group", "out", "recorded", "size")

    def __init__(
        self, src: str, dst: str, group: AxisGroup, dim: int = 0, size: int = 0, parts: tuple[int, ...] | None = None
    ) -> None:
        self.out, self.back = halves(src, dst, group, parts)
        self.group, self.dim, self.size = group, dim, size
        # Cutting a tensor that carries no gradient is plain slicing, and integers cannot pass a Function's gradient.
        self.recorded = (src, dst) not in (("N", "S"), ("N", "P"))

    def __call__(self, x: Tensor) -> Tensor:
        if not self.recorded:
            return self.out(x, self.group, self.dim, self.size)
        if torch.compiler.is_compiling() or compat.in_function_transform():
            return _Move.apply(x, self)
        return _apply(x, self)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: BoundMove) -> Tensor:
        ctx.how = how
        return how.out(x, how.group, how.dim, how.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.how
        return how.back(grads[0], how.group, how.dim, how.size), None


_apply = compat.bare_apply(_Move)


def move(
    x: Tensor, src: str, dst: str, group: AxisGroup, dim: int = 0, size: int = 0, parts: tuple[int, ...] | None = None
) -> Tensor:
    """Change `x` from kind `src` to `dst` over `group`, with the right mate in backward.

    Arguments:
        x: this rank's local tensor.
        src, dst: one letter each, see the table above.
        dim: the sharded dim where S is involved, non-negative.
        size: the global length of `dim`; parts: the sizes in it that are each cut on their own.
    """
    return BoundMove(src, dst, group, dim, size, parts)(x)
