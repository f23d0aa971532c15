"""Gradient ownership where every input of an op is replicated: who reduces, and when that is still open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.compiler.kinds import I, Kind, N, Pending, R


@dataclass(frozen=True)
class Owed:
    """What the backward of calls that run with gradients off would owe, should they be the forward of a custom autograd
    function.

    Attributes:
        lost: a reduction that nobody is told of, in words; "" for none.
        apart: values of open ownership that each rank uses in its own way.
    """

    lost: str = ""
    apart: frozenset[Pending] = frozenset()

    def and_also(self, other: Owed) -> Owed:
        return Owed(self.lost or other.lost, self.apart | other.apart)


def to_invariant(kinds: Sequence[Kind], requires_grad: Sequence[bool]) -> list[int]:
    """Inputs of kind R that must become I because an input of kind I is computed with: in an invariant computation every
    rank's gradient is whole, and an R input would count it once a rank."""
    live = [k for k, g in zip(kinds, requires_grad, strict=True) if g]
    if I in live and R in live:
        return [j for j, (k, g) in enumerate(zip(kinds, requires_grad, strict=True)) if g and k == R]
    return []


def combine(kinds: Sequence[Kind], requires_grad: Sequence[bool], data: Sequence[bool]) -> Kind:
    """Kind of the result of an op all of whose inputs are replicated.

    I wins over what is open: a computation on the model's data that is alike on all ranks is invariant. Values that depend
    on parameters only stay open, for a sharded region may yet use them.
    """
    live = [(k, d) for k, g, d in zip(kinds, requires_grad, data, strict=True) if g]
    pending = [k for k, _ in live if isinstance(k, Pending)]
    fixed = {k for k, _ in live if not isinstance(k, Pending)}
    if I in fixed or R in fixed:
        kind = I if I in fixed else R
        for p in pending:
            p.need(kind)
        return kind
    if not pending:
        return N
    if any(data) and not any(p.find().data for p in pending):
        for p in pending:
            p.need(I)
        return I
    first = pending[0]
    for p in pending[1:]:
        first.merge(p)
    return first.find()
