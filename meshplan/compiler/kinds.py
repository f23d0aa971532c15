"""What a value is on one axis while compiling: the user's placements refined by who owns the gradient.

A replicated value is one of

    I  invariant: every rank computes with it alike, so its gradient is already equal on all ranks
    R  replicated: each rank uses it in its own way, so its gradient is a partial sum that someone must reduce
    N  neutral: no gradient flows through it
    Pending  not yet known to be I or R: a parameter's use or a gathered value, settled by its first consumer

and beside them `S(d)`, the partial sum `P`, and the partial mean `A` (the true value is the mean over the axis).
The theory is that of spmd_types (R, I, V, P); `A` is P scaled by the axis degree, which is how losses travel on data axes.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.plan.placements import Shard


@dataclass(frozen=True)
class Letter:
    """A kind without parameters; compared by name."""

    name: str

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


R = Letter("R")
I = Letter("I")
N = Letter("N")
P = Letter("P")
A = Letter("A")


class Pending:
    """A replicated value whose gradient ownership its consumers decide. Values computed only from pending ones share
    their fate, so pendings are merged like a union-find; `sites` names what must be told the outcome."""

    __slots__ = ("_parent", "data", "needs", "sites")

    def __init__(self, site: object, data: bool) -> None:
        self._parent: Pending | None = None
        self.sites: set[object] = {site}
        self.needs: set[Letter] = set()
        self.data = data

    def find(self) -> Pending:
        node = self
        while node._parent is not None:
            node = node._parent
        return node

    def merge(self, other: Pending) -> Pending:
        a, b = self.find(), other.find()
        if a is not b:
            b._parent = a
            a.sites |= b.sites
            a.needs |= b.needs
            a.data |= b.data
        return a

    def need(self, kind: Letter) -> None:
        self.find().needs.add(kind)

    def __str__(self) -> str:
        return "R"

    __repr__ = __str__


Kind = Letter | Shard | Pending


def replicated(kind: Kind) -> bool:
    """Whether each rank holds the full value."""
    return isinstance(kind, Pending) or kind in (R, I, N)


def splits(kind: Kind, dim: int) -> bool:
    """Whether `dim` is sharded."""
    return isinstance(kind, Shard) and kind.dim == dim


def normal(kind: Kind, ndim: int) -> Kind:
    """`S(-1)` as `S(ndim - 1)`; every other kind unchanged."""
    if isinstance(kind, Shard) and kind.dim < 0:
        return Shard(kind.dim + ndim, kind.parts, kind.copies)
    return kind


def user_letter(kind: Kind) -> str:
    """The kind in the plan's own notation, where I, R and N are all `R`."""
    return "R" if replicated(kind) else str(kind)
