"""What a sharding rule is: for one op, on one axis, which placements of its inputs give which placement of its outputs.

A rule sees the op with its *global* shapes and arguments and lists `Strategy` objects that hold when every rank runs
the same op on its own shards. `REP` in a strategy stands for any replicated kind; `None` marks an input that is not a tensor.
Rules never guess: what they do not list is not done on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshplan.compiler.kinds import A, Kind, P, R
from meshplan.plan.placements import Shard

REP = R
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<not given>"})()


@dataclass(frozen=True)
class Strategy:
    """Kinds of the tensor inputs (in order of appearance) and of the tensor outputs. `replace` names a semantic
    operator that must run in place of the op for the strategy to be true. `plain` strategies do not hold for dims
    sharded in parts."""

    ins: tuple[Kind, ...]
    outs: tuple[Kind, ...]
    replace: str | None = None
    plain: bool = False


@dataclass(frozen=True)
class Op:
    """One op at global shapes: name, arguments, its tensor inputs in order and its tensor outputs."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        if len(self.args) > index:
            return default if self.args[index] is MISSING else self.args[index]
        return self.kwargs.get(name, default)


Rule = Callable[[Op, int], list[Strategy]]


def same(op: Op, kind: Kind) -> Strategy:
    """Every input and output of the same kind."""
    return Strategy((kind,) * len(op.ins), (kind,) * len(op.outs))


def batchlike(op: Op, dims: Sequence[int]) -> list[Strategy]:
    """All inputs and outputs sharded alike on each of `dims` (same index everywhere)."""
    return [same(op, Shard(d)) for d in dims]


def broadcast(
    ins: Sequence[Tensor], out_shape: Sequence[int], skip: Sequence[int] = ()
) -> list[tuple[tuple[Kind, ...], int]]:
    """For every out dim not in `skip`: the kinds that inputs broadcast to `out_shape` have when that dim is sharded.
    A dim of size 1 in an input is broadcast, so the input is replicated there."""
    found: list[tuple[tuple[Kind, ...], int]] = []
    nd = len(out_shape)
    for d in range(nd):
        if d in skip or out_shape[d] == 1:
            continue
        kinds: list[Kind] = []
        for t in ins:
            own = d - (nd - t.dim())
            kinds.append(Shard(own) if own >= 0 and t.shape[own] != 1 else REP)
        found.append((tuple(kinds), d))
    return found


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """A `dim` argument (None, int or list) as sorted non-negative dims; None and [] mean all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    many = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(sorted(d % ndim if ndim else 0 for d in many))


def linear_in(op: Op, *indices: int) -> list[Strategy]:
    """The op is linear in exactly these inputs jointly: partial in, partial out, others replicated. The same holds for means."""
    out = []
    for kind in (P, A):
        ins = tuple(kind if i in indices else REP for i in range(len(op.ins)))
        out.append(Strategy(ins, (kind,) * len(op.outs)))
    return out


def is_float(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


__all__ = [
    "MISSING",
    "REP",
    "Op",
    "Rule",
    "Strategy",
    "batchlike",
    "broadcast",
    "dims_of",
    "is_float",
    "linear_in",
    "same",
    "torch",
]
