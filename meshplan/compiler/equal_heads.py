"""Heads that are equal because the program repeated one: `repeat_kv` and its like before attention, told from its calls.

A dim is *equal in runs of r* where each aligned run of r indices holds one value, whatever the inputs are. An expanded dim is one
run, a reshape joins runs, what computes element by element keeps what all its operands share; anything else has runs of 1.
Attention may then be given the first head of each run alone: as a function of everything upstream it is the same, so gradients
upstream are too, although those of the repeated heads are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from meshplan import compat
from meshplan.compiler.aten import AtenOp
from meshplan.compiler.capture import Call, Trace
from meshplan.compiler.rules import semantic
from meshplan.compiler.rules.views import dim_groups, moved_dims

_RESHAPES = frozenset("view _unsafe_view reshape _reshape_alias".split())

Runs = Callable[[Tensor, int], int]
"""How long the equal runs of one dim of a tensor are."""


class EqualHeads:
    """The runs of equal indices of the values of one trace.

    Arguments:
        decomposed: the aten ops of a call, and the tensors of its results.
    """

    def __init__(
        self, trace: Trace, decomposed: Callable[[Call], tuple[list[AtenOp], list[Tensor], list[Tensor]]]
    ) -> None:
        self.trace, self.decomposed = trace, decomposed
        self._makers = {v: call for call in trace.calls for v in call.outs if v not in call.ins}
        # What is written in place is another value afterwards, and so is all that looks at its memory.
        self._written = {
            compat.storage_key(trace.values[v]) for call in trace.calls if call.in_place for v in call.outs
        }
        self._known: dict[tuple[int, int], int] = {}

    def runs(self, value: int, dim: int) -> int:
        """The length of the equal runs on `dim` of a value; 1 where nothing is known."""
        key = value, dim
        if key not in self._known:
            self._known[key] = 1  # until it is found
            self._known[key] = self._found(value, dim)
        return self._known[key]

    @property
    def repeated(self) -> frozenset[tuple[int, int]]:
        """(call, number of its result) of all values that were found to have such runs: the gradients of single heads in them are
        not one device's, only their sums are."""
        found = ((self._makers[value], value) for (value, _), runs in self._known.items() if runs > 1)
        return frozenset((call.index, call.outs.index(value)) for call, value in found)

    def _found(self, value: int, dim: int) -> int:
        call, x = self._makers.get(value), self.trace.values[value]
        if call is None or x.shape[dim] == 1 or compat.storage_key(x) in self._written:
            return 1
        if call.func in semantic.RULES and call.func not in semantic.LIKE:
            return 1  # linear, norms: nothing is known behind them
        ops, results, _ = self.decomposed(call)
        if any(_writes(item) for item in ops) or len(results) != len(call.outs):
            return 1
        given = {id(self.trace.values[v]): v for v in call.ins}
        makers = {made: item for item in ops for made in item.outs}

        def runs(t: Tensor, d: int) -> int:
            if id(t) in given:
                return self.runs(given[id(t)], d)
            item = makers.get(id(t))
            return 1 if item is None else _through(item, t, d, runs)

        return runs(results[call.outs.index(value)], dim)


def _writes(item: AtenOp) -> bool:
    return item.op.name.endswith("_") or bool(set(item.ins) & set(item.outs))


def _through(item: AtenOp, out: Tensor, dim: int, runs: Runs) -> int:
    """The runs on `dim` of a result `out` of one aten op, given those of what it was handed."""
    op, size = item.op, out.shape[dim]
    if not op.ins:
        return 1
    x = op.ins[0]
    if item.elementwise:
        return math.gcd(*(_broadcast(t, out, dim, runs) for t in op.ins))
    if op.name in ("expand", "repeat"):
        own = dim - (out.dim() - x.dim())
        if own < 0 or x.shape[own] == 1:
            return size
        return runs(x, own) if x.shape[own] == size else 1
    if op.name in _RESHAPES:
        return _reshaped(tuple(x.shape), tuple(out.shape), dim, lambda d: runs(x, d))
    if op.name == "cat":
        whole = all(t.dim() == out.dim() and t.shape[dim] == size for t in op.ins)
        return math.gcd(*(runs(t, dim) for t in op.ins)) if whole else 1
    if op.name == "slice":
        return runs(x, dim) if x.shape[dim] == size else 1
    if op.name == "select":
        return runs(x, dim + (dim >= op.args[1] % x.dim()))
    source = [src for src, dst in moved_dims(op) if dst == dim and x.shape[src] == size]
    return runs(x, source[0]) if source else 1


def _broadcast(t: Tensor, out: Tensor, dim: int, runs: Runs) -> int:
    own = dim - (out.dim() - t.dim())
    return out.shape[dim] if own < 0 or t.shape[own] == 1 else runs(t, own)


def _reshaped(src: Sequence[int], dst: Sequence[int], dim: int, runs: Callable[[int], int]) -> int:
    """The runs on `dim` of a reshape, by those on the dims of its source."""
    for left, right in dim_groups(tuple(src), tuple(dst)) or []:
        if dim in right:
            flat = 1  # of the dims of this group as one, innermost first
            for d in reversed(left):
                own = runs(d)
                flat *= own
                if own != src[d]:
                    break
            inner = math.prod(dst[d] for d in right[right.index(dim) + 1 :])
            return math.gcd(flat // inner, dst[dim]) if flat % inner == 0 else 1
    return 1
