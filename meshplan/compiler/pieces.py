"""Laying a value out over the ranks of an axis with numbers, and putting it together again: what each kind means.

kind   ranks hold                  ranks hold of its gradient g
S(d)   shards                      shards of g (with copies: summands of a shard)
R      copies                      summands of g
I, N   copies                      g (of N: none)
P      summands                    g
A      summands of n times x       g / n
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.compiler.kinds import A, I, Kind, P, R
from meshplan.plan.placements import Shard, dealt
from meshplan.runtime.comm import chunk_offset, chunk_sizes


def cut(x: Tensor, kind: Shard, n: int, rank: int) -> Tensor:
    """Shard `rank` of `x`, part by part if the kind has parts."""
    parts = kind.parts or (x.shape[kind.dim],)
    n, rank = n // kind.copies, rank // kind.copies
    owned = [dealt(parts, k, n, rank) for k in range(len(parts))]
    mine = [
        p.narrow(kind.dim, chunk_offset(p.shape[kind.dim], n, at), chunk_sizes(p.shape[kind.dim], n)[at])
        for p, at in zip(x.split(list(parts), kind.dim), owned, strict=True)
    ]
    return torch.cat(mine, kind.dim) if len(mine) > 1 else mine[0].clone()


def local_size(shape: Sequence[int], kind: Kind, n: int, rank: int) -> tuple[int, ...]:
    """Shape of the shard of `rank` of a tensor of `shape`."""
    out = list(shape)
    if isinstance(kind, Shard):
        n, rank = n // kind.copies, rank // kind.copies
        out[kind.dim] = sum(chunk_sizes(p, n)[rank] for p in kind.parts or (out[kind.dim],))
    return tuple(out)


def spread(x: Tensor, kind: Kind, n: int, generator: torch.Generator) -> list[Tensor]:
    """What each of `n` ranks holds of `x`: shards, copies, or random summands."""
    if isinstance(kind, Shard):
        return [cut(x, kind, n, rank) for rank in range(n)]
    if kind not in (P, A):
        return [x.clone() for _ in range(n)]
    if x.dtype.is_floating_point or x.dtype.is_complex:
        rest = [random(x.shape, x.dtype, generator) for _ in range(n - 1)]
    else:
        rest = [torch.randint(-3, 4, x.shape, generator=generator).to(x.dtype) for _ in range(n - 1)]
    total = x * n if kind == A else x
    return [*rest, total - sum(rest[1:], rest[0])] if rest else [x.clone()]


def spread_gradient(g: Tensor, kind: Kind, n: int, generator: torch.Generator) -> list[Tensor]:
    """What each rank is given as the gradient of a value of `kind`: see the module's docstring."""
    if kind == R:
        return spread(g, P, n, generator)
    if isinstance(kind, Shard) and kind.copies > 1:
        shards = spread(g, Shard(kind.dim), n // kind.copies, generator)
        return [summand for shard in shards for summand in spread(shard, P, kind.copies, generator)]
    return spread(g / n if kind == A else g, kind if isinstance(kind, Shard) else I, n, generator)


def gather(parts: Sequence[Tensor], kind: Kind, whole: Sequence[int]) -> Tensor | None:
    """The global value of which ranks hold `parts` as `kind` says; None where copies differ or shards do not fit."""
    if isinstance(kind, Shard) and kind.copies > 1:
        owned = [parts[i : i + kind.copies] for i in range(0, len(parts), kind.copies)]
        ones = [gather(same, I, whole) for same in owned]
        agreed = [one for one in ones if one is not None]
        return gather(agreed, Shard(kind.dim), whole) if len(agreed) == len(ones) else None
    if isinstance(kind, Shard):
        n, dealing = len(parts), kind.parts or (whole[kind.dim],)
        sizes = [chunk_sizes(p, n) for p in dealing]
        split = [
            part.split([s[dealt(dealing, k, n, r)] for k, s in enumerate(sizes)], kind.dim) for r, part in enumerate(parts)
        ]
        owners = [[dealt(dealing, k, n, r) for r in range(n)] for k in range(len(sizes))]  # an involution
        return torch.cat([split[r][k] for k in range(len(sizes)) for r in owners[k]], kind.dim)
    if kind in (P, A):
        total = sum(parts[1:], parts[0])
        return total / len(parts) if kind == A else total
    return parts[0] if all(apart(p, parts[0]) <= tolerance(p) for p in parts) else None


def gather_gradient(parts: Sequence[Tensor], kind: Kind, whole: Sequence[int]) -> Tensor | None:
    """The global gradient of a value of `kind` of which ranks got `parts`."""
    if kind == R:
        return gather(parts, P, whole)
    if isinstance(kind, Shard) and kind.copies > 1:
        owned = [parts[i : i + kind.copies] for i in range(0, len(parts), kind.copies)]
        return gather([sum(many[1:], many[0]) for many in owned], Shard(kind.dim), whole)
    if isinstance(kind, Shard):
        return gather(parts, kind, whole)
    same = gather(parts, I, whole)
    return same * len(parts) if kind == A and same is not None else same


def apart(a: Tensor, b: Tensor, floor: float = 1.0) -> float:
    """Largest difference relative to the largest value of `b`, or to `floor` if that is larger; nan and infinity must
    be in the same places."""
    if a.numel() == 0:
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    special = ~torch.isfinite(b)
    if special.any() or not torch.isfinite(a).all():
        if not torch.equal(special, ~torch.isfinite(a)) or not torch.equal(
            a[special].nan_to_num(7.0), b[special].nan_to_num(7.0)
        ):
            return float("inf")
        a, b = a[~special], b[~special]
        if a.numel() == 0:
            return 0.0
    return (a - b).abs().max().item() / max(b.abs().max().item(), floor)


def tolerance(x: Tensor) -> float:
    """What `apart` may be for two ways of computing `x` that differ in rounding only."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return max(1e-10, 64 * torch.finfo(x.dtype).eps)


def random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal values."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)
