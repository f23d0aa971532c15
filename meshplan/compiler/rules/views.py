"""Aten ops that move elements without computing: views, permutations, slices, concatenations, splits."""

from __future__ import annotations

import math
from itertools import accumulate

from meshplan.compiler.kinds import A, Kind, P
from meshplan.compiler.rules.base import REP, Op, Rule, Strategy, dims_of, is_float, same
from meshplan.plan.placements import Mirrored, Shard, like_parts
from meshplan.runtime.comm import chunk_sizes


def passes_partial(op: Op) -> list[Strategy]:
    """Moving elements is linear: partial in, partial out."""
    return [same(op, kind) for kind in (P, A)] if op.outs and is_float(op.outs[0]) else []


def dim_groups(src: tuple[int, ...], dst: tuple[int, ...]) -> list[tuple[list[int], list[int]]] | None:
    """Match the dims of a reshape: the finest pairs of runs of dims with equal products, `(2, 3, 4) -> (6, 4)` gives
    `[([0, 1], [0]), ([2], [1])]`. Dims of size 1 join no group. None where a size is 0."""
    if 0 in src or 0 in dst:
        return None
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    a, b = [k for k, s in enumerate(src) if s != 1], [k for k, s in enumerate(dst) if s != 1]
    while i < len(a) and j < len(b):
        left, right = [a[i]], [b[j]]
        pa, pb = src[a[i]], dst[b[j]]
        i, j = i + 1, j + 1
        while pa != pb:
            if pa < pb:
                pa *= src[a[i]]
                left.append(a[i])
                i += 1
            else:
                pb *= dst[b[j]]
                right.append(b[j])
                j += 1
        groups.append((left, right))
    return groups


def reshape(op: Op, n: int) -> list[Strategy]:
    """A sharded dim survives when it leads its group and the shards are whole blocks of the result's leading dim."""
    src, dst = tuple(op.ins[0].shape), tuple(op.outs[0].shape)
    found: list[Strategy] = []
    for left, right in dim_groups(src, dst) or []:
        if len(left) == len(right) == 1:
            found.append(Strategy((Shard(left[0]),), (Shard(right[0]),)))
        elif src[left[0]] % n == 0 and dst[right[0]] % n == 0:
            found.append(Strategy((Shard(left[0]),), (Shard(right[0]),), plain=True))
        if len(left) == 1 and len(right) > 1:
            found += _fused(src[left[0]], left[0], right, dst, n)
        if len(right) == 1 and len(left) > 1:
            found += _joined(left, right[0], src, n)
    return found + passes_partial(op)


def _fused(size: int, dim: int, right: list[int], dst: tuple[int, ...], n: int) -> list[Strategy]:
    # A fused dim of equal parts, opened as (parts, inner, ...): each part is split on its own, so `inner` is sharded.
    found = []
    parts = 1
    for k, d in enumerate(right[:-1]):
        parts *= dst[d]
        inner = right[k + 1]
        if parts > 1 and dst[inner] % n == 0:
            found.append(Strategy((Shard(dim, (size // parts,) * parts),), (Shard(inner),)))
    return found


def _joined(left: list[int], into: int, src: tuple[int, ...], n: int) -> list[Strategy]:
    # Dims joined into one, of which not the first is split: one part for each step of those before it.
    found = []
    for k, d in enumerate(left[1:], 1):
        if src[d] % n == 0:
            parts = math.prod(src[e] for e in left[:k])
            inner = math.prod(src[e] for e in left[k + 1 :])
            found.append(Strategy((Shard(d),), (Shard(into, (src[d] * inner,) * parts),)))
    return found


def permutation(op: Op, n: int) -> list[Strategy]:
    """transpose, permute, movedim, t, unsqueeze, squeeze, expand, flip off the dim: follow where each dim goes."""
    x, out = op.ins[0], op.outs[0]
    moves = [(src, dst) for src, dst in moved_dims(op) if x.shape[src] == out.shape[dst]]
    if op.name.startswith("squeeze"):
        # A rank whose shard has one row would drop the dim that the others keep.
        moves = [(src, dst) for src, dst in moves if 1 not in chunk_sizes(x.shape[src], n) or _spared(op, src)]
    return [Strategy((Shard(src),), (Shard(dst),)) for src, dst in moves] + passes_partial(op)


def _spared(op: Op, dim: int) -> bool:
    """Whether a squeeze leaves `dim` alone whatever its length."""
    named = op.args[1] if len(op.args) > 1 else None
    return named is not None and dim not in dims_of(named, op.ins[0].dim())


def moved_dims(op: Op) -> list[tuple[int, int]]:
    """(dim of the input, dim of the result) of the dims along which elements keep their order; the caller compares lengths."""
    x = op.ins[0]
    nd, name = x.dim(), op.name.rstrip("_")
    if name in ("t", "numpy_T"):
        return [(d, nd - 1 - d) for d in range(nd)]
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = op.args[1] % nd, op.args[2] % nd
        swap = {a: b, b: a}
        return [(d, swap.get(d, d)) for d in range(nd)]
    if name == "permute":
        return [(src % nd, dst) for dst, src in enumerate(op.args[1])]
    if name == "unsqueeze":
        at = op.args[1] % (nd + 1)
        return [(d, d + (d >= at)) for d in range(nd)]
    if name == "squeeze":
        dim = op.args[1] if len(op.args) > 1 else None
        gone = {d for d in range(nd) if x.shape[d] == 1}
        if dim is not None:
            gone &= {d % nd for d in (dim if isinstance(dim, (list, tuple)) else [dim])}
        kept = [d for d in range(nd) if d not in gone]
        return [(src, dst) for dst, src in enumerate(kept)]
    if name in ("expand", "broadcast_to"):
        lead = op.outs[0].dim() - nd
        return [(d, d + lead) for d in range(nd) if x.shape[d] != 1]
    if name == "flip":
        return [(d, d) for d in range(nd) if d not in {e % nd for e in op.args[1]}]
    if name == "roll":
        rolled = {e % nd for e in (op.arg(2, "dims") or range(nd))}
        return [(d, d) for d in range(nd) if d not in rolled]
    if name in ("repeat", "tile"):
        times = list(op.args[1])
        lead = len(times) - nd
        return [(d, d + lead) for d in range(nd) if times[d + lead] == 1]
    if name in ("tril", "triu", "diagonal_scatter"):
        return [(d, d) for d in range(nd - 2)]
    return []


def along_dim(op: Op, n: int) -> list[Strategy]:
    """Ops that act along one dim and leave the others alone (slice, cumsum, sort, softmax...): any other dim may be sharded."""
    x = op.ins[0]
    nd = x.dim()
    at = 2 if op.name == "topk" else 1
    dim = op.args[at] if len(op.args) > at and isinstance(op.args[at], int) else op.kwargs.get("dim", -1)
    return [same(op, Shard(d)) for d in range(nd) if d != dim % max(nd, 1)]


def slices(op: Op, n: int) -> list[Strategy]:
    """slice: other dims; the sliced dim too when the slice takes all of it."""
    found = along_dim(op, n) if len(op.args) > 1 else batch_all(op)
    x, out = op.ins[0], op.outs[0]
    dim = (op.args[1] if len(op.args) > 1 else 0) % x.dim()
    step = op.arg(4, "step", 1)
    if x.shape[dim] == out.shape[dim] and step == 1 and (op.arg(2, "start") or 0) == 0:
        found.append(same(op, Shard(dim)))
    return found + passes_partial(op)


def batch_all(op: Op) -> list[Strategy]:
    return [same(op, Shard(d)) for d in range(op.ins[0].dim())]


def select(op: Op, n: int) -> list[Strategy]:
    """select drops the dim; others keep their shards under their new index."""
    nd = op.ins[0].dim()
    gone = op.args[1] % nd
    moves = [(d, d - (d > gone)) for d in range(nd) if d != gone]
    return [Strategy((Shard(a),), (Shard(b),) * len(op.outs)) for a, b in moves] + passes_partial(op)


def unbind(op: Op, n: int) -> list[Strategy]:
    nd = op.ins[0].dim()
    gone = (op.arg(1, "dim", 0) or 0) % nd
    moves = [(d, d - (d > gone)) for d in range(nd) if d != gone]
    return [Strategy((Shard(a),), (Shard(b),) * len(op.outs)) for a, b in moves] + passes_partial(op)


def concatenate(op: Op, n: int) -> list[Strategy]:
    """cat: inputs sharded alike off the dim; on it, sharded inputs give one fused dim whose parts are split one by one.
    An input without elements adds no part; one of shape [0] goes with any others."""
    nd = op.outs[0].dim()
    dim = (op.arg(1, "dim", 0) or 0) % nd
    void = [t.dim() == 1 < nd and t.numel() == 0 for t in op.ins]
    found = [
        Strategy(tuple(REP if v else Shard(d) for v in void), (Shard(d),))
        for d in range(nd)
        if d != dim and not all(void)
    ]
    sizes = [0 if v else t.shape[dim] for v, t in zip(void, op.ins, strict=True)]
    held = tuple(s for s in sizes if s)
    if held and all(s % n == 0 for s in held) and (len(held) > 1 or len(sizes) > 1):
        found.append(
            Strategy(tuple(Shard(dim) if s else REP for s in sizes), (Shard(dim, held if len(held) > 1 else None),))
        )
    return found + passes_partial(op)


def stack(op: Op, n: int) -> list[Strategy]:
    nd = op.outs[0].dim()
    dim = (op.arg(1, "dim", 0) or 0) % nd
    found = []
    for d in range(nd - 1):
        found.append(Strategy((Shard(d),) * len(op.ins), (Shard(d + (d >= dim)),)))
    return found + passes_partial(op)


def split(op: Op, n: int) -> list[Strategy]:
    """split, split_with_sizes, chunk: off the dim always; on it when the fused parts are unions of the outputs' own ranges."""
    x = op.ins[0]
    nd = x.dim()
    dim = (op.arg(2, "dim", 0) or 0) % nd
    found = [same(op, Shard(d)) for d in range(nd) if d != dim]
    sizes = tuple(t.shape[dim] for t in op.outs)
    if all(s % n == 0 for s in sizes):
        found.append(Strategy((Shard(dim, sizes),), (Shard(dim),) * len(op.outs)))
    return found + passes_partial(op)


def regroup_parts(held: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """Which of the `held` parts make up each `wanted` range: `(4, 4, 8)` as `(8, 8)` is `[(4, 4), (8,)]`; None if they cross."""
    ends = list(accumulate(wanted))
    out: list[tuple[int, ...]] = []
    here: list[int] = []
    at = 0
    for size in held:
        here.append(size)
        at += size
        if len(out) < len(ends) and at == ends[len(out)]:
            if isinstance(held, Mirrored) and len(here) % 2:
                return None
            out.append(like_parts(held, here))
            here = []
        elif len(out) < len(ends) and at > ends[len(out)]:
            return None
    return out if len(out) == len(wanted) and 0 not in wanted else None


def creation(op: Op, n: int) -> list[Strategy]:
    """new_zeros and friends: a fresh constant, replicated whatever the tensor it borrows its dtype from."""
    found: list[Strategy] = []
    kinds: list[Kind] = [Shard(d) for d in range(op.ins[0].dim())] if op.ins else []
    for kind in [*kinds, P, A]:
        found.append(Strategy((kind,) * len(op.ins), (REP,) * len(op.outs)))
    return found


def expand_as(op: Op, n: int) -> list[Strategy]:
    """x.expand_as(other): dims that x has of its own, and those that it takes from `other`."""
    x, other = op.ins
    found = [Strategy((Shard(own), Shard(d)), (Shard(d),)) if (own := d - other.dim() + x.dim()) >= 0 and x.shape[own] != 1
             else Strategy((REP, Shard(d)), (Shard(d),)) for d in range(other.dim()) if other.shape[d] != 1]  # fmt: skip
    return found + [Strategy((kind, REP), (kind,)) for kind in (P, A)]


def reshape_as(op: Op, n: int) -> list[Strategy]:
    """x.view_as(other): `other` has the sizes of the result, so that it is split as that."""
    found = [s for s in reshape(op, n) if isinstance(s.outs[0], Shard)]
    split = [Strategy((*s.ins[:1], *s.outs), s.outs, plain=s.plain) for s in found]
    return split + [Strategy((kind, REP), (kind,)) for kind in (P, A)]


def complex_view(op: Op, n: int) -> list[Strategy]:
    """view_as_complex and view_as_real: any dim but the last one of the real tensor, which holds (real, imaginary)."""
    return [same(op, Shard(d)) for d in range(min(op.ins[0].dim(), op.outs[0].dim()))] + passes_partial(op)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view_as_complex", "view_as_real"), complex_view),
    **dict.fromkeys("view _unsafe_view reshape flatten unflatten view_copy _reshape_alias".split(), reshape),
    **dict.fromkeys(
        "t transpose permute unsqueeze squeeze expand flip roll repeat tril triu transpose_ t_ squeeze_ unsqueeze_".split(),
        permutation,
    ),
    "slice": slices,
    "select": select,
    "unbind": unbind,
    "cat": concatenate,
    "stack": stack,
    **dict.fromkeys("split split_with_sizes chunk".split(), split),
    **dict.fromkeys("new_zeros new_ones new_empty new_full new_empty_strided".split(), creation),
}
