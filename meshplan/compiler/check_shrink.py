"""Small relatives of a use: the same call with short dims of unequal length, cut evenly where the true ones are.

What is kept: which dims have length 1, which divide by the degree, which have as many elements as there are ranks,
which leave a rank empty, and parity. A relative counts only if the call runs at its sizes and gives as many results of
as many dims; a dim that cannot be shortened alone (a head count in a grouped attention) keeps its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from meshplan import compat
from meshplan.compiler.capture import Ref
from meshplan.compiler.context import inner_of
from meshplan.compiler.kinds import Kind
from meshplan.compiler.localize import CREATED
from meshplan.compiler.rules.views import dim_groups
from meshplan.compiler.uses import Spec, Use
from meshplan.plan.placements import Shard, like_parts
from meshplan.runtime.comm import chunk_sizes

LIMIT = 2**20
"""Elements of all arguments and results up to which a use is run at all."""
SMALL = 2**9  # below this nothing is gained
_VIEWS = frozenset({"view", "reshape", "_unsafe_view"})


def shrink(use: Use) -> Use | None:
    """A small relative of `use`, itself where it is small; None where none of at most `LIMIT` elements is found."""
    copied = any(isinstance(k, Shard) and k.copies > 1 for k in (*use.ins, *use.outs))
    degree = use.degree if copied or inner_of(use.replace) else small_degree(use.degree)
    if _elements(use) <= SMALL and use.degree <= 8:
        return use
    sizes_only = not any(isinstance(x, torch.dtype) for x in use.leaves)
    found = _as_view(use, degree) if use.name in _VIEWS and sizes_only else None
    found = found or _by_sizes(use, degree)
    if found is None and use.degree <= 8:
        found = use
    return found if found is not None and _elements(found) <= LIMIT else None


def small_degree(degree: int) -> int:
    """2 to 4 ranks that divide `degree`, so that what divides by the one divides by the other; else the degree."""
    return degree if degree <= 4 else next((n for n in (4, 3, 2) if degree % n == 0), degree)


class _Lengths:
    """Short lengths with what the true length has, each handed out once. Lengths that are not `split` keep parity only;
    None means that any may be."""

    def __init__(self, use: Use, degree: int, split: set[int] | None = None) -> None:
        self.was, self.degree, self.split = use.degree, degree, split
        self._taken: set[int] = set()

    def pick(self, size: int) -> int:
        if size in (0, 1):
            return size
        whole = self.split is not None and size not in self.split
        if size == self.was and not whole:
            return self.degree
        candidates = count(4 - size % 2, 2) if whole else self._candidates(size)
        found = next((n for n in candidates if n not in self._taken), size)
        self._taken.add(found)
        return min(found, size)

    def _candidates(self, size: int) -> Iterator[int]:
        n = self.degree
        if size % self.was == 0:
            step = 2 * n if size % 2 == 0 and n % 2 else n
            return (step * k for k in count(2))
        empty = 0 in chunk_sizes(size, self.was)
        # Only few lengths leave a rank empty, none of them beyond n * n.
        return (
            k
            for k in range(n + 1, n * n + 64)
            if k % n and (0 in chunk_sizes(k, n)) == empty and (n % 2 == 0 or k % 2 == size % 2)
        )


def _by_sizes(use: Use, degree: int) -> Use | None:
    """Every length replaced by a short one, wherever it stands among shapes and arguments; if the call refuses, only
    those lengths that it accepts one by one."""
    lengths = _Lengths(use, degree, _split(use))
    parts = _parts(use)
    table: dict[int, int] = {}
    for size in sorted({s for many in parts.values() for s in many}):
        table[size] = lengths.pick(size)
    for total, pieces in parts.items():
        table[total] = sum(table[s] for s in pieces)
    free = sorted({s for t in use.tensors for s in t.shape if s > 1} | set(_written(use)))
    for size in free:
        table.setdefault(size, lengths.pick(size))
    whole = _with(use, table, degree)
    if whole is not None:
        return whole
    kept: dict[int, int] = {}
    for size in free:
        if _with(use, {**kept, size: table[size]}, degree) is not None:
            kept[size] = table[size]
    for many, few in _multiples(free):
        # Two lengths of which one is so many times the other: query heads and key heads.
        tried = {**kept, few: table[few], many: table[few] * (many // few)}
        if many not in kept and tried[many] < many and _with(use, tried, degree) is not None:
            kept = tried
    return _with(use, kept, degree)


def _multiples(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in sizes for b in sizes if a > b and a % b == 0)


def _split(use: Use) -> set[int]:
    """The lengths of dims that are split."""
    shapes = [*(t.shape for t in use.tensors), *(_results(use) or [])]
    kinds = [*use.ins, *use.outs]
    pairs = zip(shapes, kinds[: len(shapes)], strict=True)
    return {shape[k.dim] for shape, k in pairs if isinstance(k, Shard) and k.dim < len(shape)}


def _parts(use: Use) -> dict[int, tuple[int, ...]]:
    return {sum(k.parts): k.parts for k in (*use.ins, *use.outs) if isinstance(k, Shard) and k.parts}


def _written(use: Use) -> list[int]:
    """Sizes that only the arguments of a creation name."""
    return [x for x in use.leaves if type(x) is int and x > 1] if use.name in CREATED else []


def _with(use: Use, table: Mapping[int, int], degree: int) -> Use | None:
    """`use` with lengths replaced by `table`, if the call accepts it."""
    tensors = tuple(Spec(tuple(table.get(s, s) for s in t.shape), t.dtype, t.grad) for t in use.tensors)
    leaves = tuple(_renamed(x, table) for x in use.leaves)
    new = replace(
        use, tensors=tensors, leaves=leaves, degree=degree,
        ins=tuple(_kind(k, table) for k in use.ins), outs=tuple(_kind(k, table) for k in use.outs),
    )  # fmt: skip
    return new if _accepted(use, new) else None


def _renamed(x: Any, table: Mapping[int, int]) -> Any:
    # Numbers below 5 name dims and counts more often than lengths.
    if type(x) is int:
        return table.get(x, x) if abs(x) > 4 else x
    if isinstance(x, slice):
        return slice(*(_renamed(v, table) for v in (x.start, x.stop, x.step)))
    return x


def _kind(kind: Kind, table: Mapping[int, int]) -> Kind:
    if not isinstance(kind, Shard) or not kind.parts:
        return kind
    return Shard(kind.dim, like_parts(kind.parts, (table.get(p, p) for p in kind.parts)))


def _accepted(use: Use, new: Use) -> bool:
    """Whether the new call runs and its results look like the old ones."""
    was, now = _results(use), _results(new)
    if was is None or now is None or [len(s) for s in was] != [len(s) for s in now]:
        return False
    if any((a == 1) != (b == 1) for old, fresh in zip(was, now, strict=True) for a, b in zip(old, fresh, strict=True)):
        return False
    old, fresh = [*was, *(t.shape for t in use.tensors)], [*now, *(t.shape for t in new.tensors)]
    for a, b, kind in zip(old, fresh, (*new.outs, *new.ins), strict=True):
        if not isinstance(kind, Shard) or kind.dim >= len(a):
            continue  # a dim that is not there is no matter of sizes: left for the run to refute
        was_pieces, pieces = use.degree // kind.copies, new.degree // kind.copies
        if (a[kind.dim] % was_pieces == 0) != (b[kind.dim] % pieces == 0):
            return False
        if kind.parts and sum(kind.parts) != b[kind.dim]:
            return False
    return True


def _results(use: Use) -> list[tuple[int, ...]] | None:
    """Shapes of the call's results, on tensors without values; None where it refuses."""
    tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in use.tensors]
    # Where the call says a device, here it is that of the tensors.
    leaves = tuple(torch.device("meta") if isinstance(x, torch.device) else x for x in use.leaves)
    args, kwargs = replace(use, leaves=leaves).arguments(tensors)
    if not tensors:
        kwargs = {**kwargs, "device": "meta"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = use.func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    made = args[0] if use.in_place else out
    return [tuple(t.shape) for t in compat.flatten(made)[0] if isinstance(t, torch.Tensor)]


def _as_view(use: Use, degree: int) -> Use | None:
    """A reshape with short lengths: each run of dims that it joins or splits is shortened by its factors."""
    results = _results(use)
    if results is None:
        return None
    source, target = use.tensors[0].shape, results[0]
    lengths = _Lengths(use, degree)
    before, after = list(source), list(target)
    ins, outs = use.ins[0], use.outs[0]
    for left, right in dim_groups(source, target) or []:
        if len(left) > 1 and len(right) > 1:
            continue
        many, one = (left, right[0]) if len(right) == 1 else (right, left[0])
        here, there = (before, after) if many is left else (after, before)
        many_kind, one_kind = (ins, outs) if many is left else (outs, ins)
        cut, own = (many_kind.dim, len(many_kind.parts or (0,))) if isinstance(many_kind, Shard) else (-1, 1)
        sizes = {d: own * lengths.pick(here[d] // own) if d == cut else lengths.pick(here[d]) for d in many}
        product = math.prod(sizes.values())
        if (there[one] % use.degree == 0) != (product % degree == 0):
            continue
        for d, size in sizes.items():
            here[d] = size
        if isinstance(many_kind, Shard) and many_kind.parts and cut in sizes:
            many_kind = Shard(cut, like_parts(many_kind.parts, [sizes[cut] // own] * own))
        if isinstance(one_kind, Shard) and one_kind.parts and one_kind.dim == one:
            if cut not in sizes or len(set(one_kind.parts)) > 1:
                return None
            parts = own * math.prod(sizes[d] for d in many[: many.index(cut)])
            one_kind = Shard(one, like_parts(one_kind.parts, [product // parts] * parts))
        ins, outs = (many_kind, one_kind) if many is left else (one_kind, many_kind)
        there[one] = product
    leaves, structure = compat.flatten(((Ref(0), tuple(after)), {}))
    new = replace(
        use, func=torch.Tensor.reshape, name="reshape", tensors=(replace(use.tensors[0], shape=tuple(before)),),
        leaves=tuple(leaves), structure=structure, ins=(ins,), outs=(outs,), degree=degree,
    )  # fmt: skip
    return new if _accepted(use, new) else None


def _elements(use: Use) -> int:
    results = _results(use)
    shapes: Sequence[Sequence[int]] = [*(t.shape for t in use.tensors), *(results or [])]
    return sum(math.prod(s) for s in shapes) if results is not None else LIMIT + 1
