"""Values of all ranks and the one they stand for: put together by a layout, or the layout read off them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from meshplan.compiler.kinds import A, I, Kind, N, P, R
from meshplan.compiler.pieces import apart, cut, gather, gather_gradient, local_size, tolerance
from meshplan.mesh.spec import DATA_AXES, MeshSpec
from meshplan.plan.placements import Shard, like_parts, parts_left


def take(x: Tensor, kinds: Sequence[Kind], axes: Sequence[str], spec: MeshSpec, rank: int) -> Tensor:
    """What `rank` holds of `x` with one kind an axis (outermost first): shards are cut, anything else is a copy."""
    for axis, kind in zip(axes, kinds, strict=True):
        if isinstance(kind, Shard):
            x = cut(x, kind, spec.degree(axis), spec.coord(rank, axis))
    return x.clone()


def nested(kinds: Sequence[Kind], axes: Sequence[str], spec: MeshSpec) -> tuple[Kind, ...]:
    """`kinds`, whose fused parts count in global sizes, with those of an inner axis in what outer ones leave of them."""
    out: list[Kind] = []
    for kind in kinds:
        if isinstance(kind, Shard) and kind.parts:
            parts = kind.parts
            for axis, outer in zip(axes, out, strict=False):
                n = spec.degree(axis)
                if not isinstance(outer, Shard) or outer.dim != kind.dim:
                    continue
                left = parts_left(parts, outer.parts, n)
                if left is not None:
                    parts = left
                elif all(p % n == 0 for p in parts):
                    parts = like_parts(parts, (p // n for p in parts))
            kind = Shard(kind.dim, parts, kind.copies)
        out.append(kind)
    return tuple(out)


def take_gradient(g: Tensor, kinds: Sequence[Kind], axes: Sequence[str], spec: MeshSpec, rank: int) -> Tensor:
    """What `rank` is given as the gradient of a value whose gradient is `g`: the n-th part of a mean; of a value that
    counts every rank's gradient (R), the first rank's whole and the others' nothing. On data axes times n: see `_scale`."""
    for axis, kind in zip(axes, kinds, strict=True):
        n, at = spec.degree(axis), spec.coord(rank, axis)
        g = g * _scale(axis, kind, spec)
        if isinstance(kind, Shard):
            g = cut(g, kind, n, at)
        elif kind == A:
            g = g / n
        elif kind == R and at:
            g = g * 0
    return g.clone()


def _scale(axis: str, kind: Kind, spec: MeshSpec) -> int:
    """By how much a rank's own share of a gradient is too large: gradients are averaged over data axes in the end, so all
    but the whole ones of an I value are kept times n there (`meshplan.runtime.boundary`)."""
    return 1 if kind == I or spec.parent(axis) not in DATA_AXES else spec.degree(axis)


def whole(
    values: Sequence[Tensor],
    kinds: Sequence[Kind],
    axes: Sequence[str],
    spec: MeshSpec,
    like: Tensor,
    gradient: bool = False,
) -> Tensor | None:
    """The global value of which ranks hold `values`, by rank, as `kinds` say; None where they do not fit together.

    Arguments:
        like: a tensor of the global shape.
        gradient: `values` are gradients of a value with these kinds.
    """
    together: Callable[..., Tensor | None] = gather_gradient if gradient else gather
    held: dict[int, Tensor] = dict(enumerate(values))
    for k in range(len(axes) - 1, -1, -1):
        joined: dict[int, Tensor] = {}
        for ranks in spec.groups(axes[k]):
            if ranks[0] not in held:
                continue
            shape: Sequence[int] = like.shape
            for axis, kind in zip(axes[:k], kinds[:k], strict=True):
                shape = local_size(shape, kind, spec.degree(axis), spec.coord(ranks[0], axis))
            parts = [held[r] for r in ranks]
            if [p.shape for p in parts] != [local_size(shape, kinds[k], len(ranks), i) for i in range(len(ranks))]:
                return None
            made = together(parts, kinds[k], shape)
            if made is None:
                return None
            joined[ranks[0]] = made / _scale(axes[k], kinds[k], spec) if gradient else made
        held = joined
    return held[0]


def distance(
    values: Sequence[Tensor],
    kinds: Sequence[Kind],
    axes: Sequence[str],
    spec: MeshSpec,
    one: Tensor,
    *,
    floor: float,
    gradient: bool = False,
) -> float:
    """How far `values`, put together as `kinds` say, are from `one`, relative to its largest value (at least `floor`);
    infinity where they do not fit together."""
    made = whole(values, kinds, axes, spec, one, gradient)
    if made is None or made.shape != one.shape or made.dtype != one.dtype:
        return float("inf")
    return apart(made, one, floor)


def infer(values: Sequence[Tensor], axes: Sequence[str], spec: MeshSpec, one: Tensor) -> tuple[Kind, ...] | None:
    """The first layout that explains `values` as parts of `one`: R where ranks agree with it, S(d) where their
    concatenation does, P where their sum does, A where their mean does, on each axis; None where none does."""
    for kinds in itertools.product(*(list(_candidates(one)) for _ in axes)):
        if distance(values, kinds, axes, spec, one, floor=1e-6) <= tolerance(one):
            return kinds
    return None


def _candidates(x: Tensor) -> Iterator[Kind]:
    yield N
    yield from (Shard(d) for d in range(x.dim()))
    yield P
    if x.is_floating_point() or x.is_complex():
        yield A


def show(kinds: Sequence[Kind], axes: Sequence[str]) -> str:
    """`{dp_shard: S(0), tp: R}`; the owners of gradients are told apart."""
    return (
        "{" + ", ".join(f"{axis}: {'R' if kind == N else kind}" for axis, kind in zip(axes, kinds, strict=True)) + "}"
    )
