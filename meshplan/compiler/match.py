"""Choosing a strategy on one axis: the one whose input kinds are at hand, else the one that is cheapest to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from meshplan.compiler.context import MARK
from meshplan.compiler.kinds import A, I, Kind, P, replicated
from meshplan.compiler.rules.base import REP, Strategy
from meshplan.compiler.rules.views import regroup_parts
from meshplan.plan.placements import Shard

_NEVER = float("inf")
LAST_RESORT = 1e15  # bytes: moving a sharded parameter is dearer than anything else that can be done


@dataclass(frozen=True)
class Choice:
    """A strategy with what each input must become (None: as it is) and the kinds of its outputs."""

    strategy: Strategy
    wanted: tuple[Kind | None, ...]
    outs: tuple[Kind, ...]
    cost: float


def choose(
    strategies: Sequence[Strategy],
    kinds: Sequence[Kind],
    tensors: Sequence[Tensor],
    params: Sequence[bool],
    degree: int,
    written: bool = False,
) -> Choice | None:
    """The cheapest strategy given the inputs' `kinds`; cost in bytes moved by one rank, forward and backward.

    Arguments:
        tensors: the inputs at global shape (sizes of what would move, and whether gradients flow).
        params: which inputs are parameters: a sharded one is redistributed only where nothing else can be done, a
            replicated one may enter a sum once.
        written: whether the op writes into its first input, which then is not redistributed if it can be helped.
    """
    best: Choice | None = None
    for s in strategies:
        if len(s.ins) != len(kinds):
            continue
        for way in (s, *_in_parts(s, kinds, tensors)):
            found = _reach(way, kinds, tensors, params, degree)
            if found is not None and written and found.wanted[0] is not None:
                found = replace(found, cost=found.cost + LAST_RESORT)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
    return best


def _in_parts(s: Strategy, kinds: Sequence[Kind], tensors: Sequence[Tensor]) -> list[Strategy]:
    """`s` for dims of fused parts that inputs at hand are cut in: then every input has to be cut part by part."""
    if s.plain or not _any_order(s) or any(isinstance(k, Shard) and k.parts for k in s.ins):
        return []
    found = {
        have.parts: None
        for have, want in zip(kinds, s.ins, strict=True)
        if isinstance(have, Shard) and have.parts and isinstance(want, Shard) and have.dim == want.dim
    }
    ways = []
    for parts in found:
        if all(t.shape[k.dim] == sum(parts) for t, k in zip(tensors, s.ins, strict=True) if isinstance(k, Shard)):
            ins = tuple(Shard(k.dim, parts) if isinstance(k, Shard) else k for k in s.ins)
            outs = [_of_parts(k, parts) for k in s.outs]
            if None not in outs:
                ways.append(Strategy(ins, tuple(k for k in outs if k is not None), s.replace, s.plain))
    return ways


def _any_order(s: Strategy) -> bool:
    """Whether the operator that runs the strategy asks nothing of the order in which a dim is split."""
    tokens = s.replace == "cross_entropy" and isinstance(s.ins[1], Shard)
    return tokens or s.replace in (None, "split_norm", "dropout", "experts") or s.replace.startswith(MARK)


def _of_parts(out: Kind, parts: tuple[int, ...]) -> Kind | None:
    """A result's kind where the inputs are cut in `parts`; None where theirs do not make up the parts that it has itself."""
    if not isinstance(out, Shard) or out.parts is None:
        return Shard(out.dim, parts) if isinstance(out, Shard) else out
    whole = all(size == sum(parts) for size in out.parts)  # inputs one after the other
    return Shard(out.dim, parts * len(out.parts)) if whole else None


def _reach(
    s: Strategy, kinds: Sequence[Kind], tensors: Sequence[Tensor], params: Sequence[bool], degree: int
) -> Choice | None:
    cost = 0.0
    wanted: list[Kind | None] = []
    regrouped: list[tuple[int, ...]] | None = None
    carried = _carried(s, kinds)
    whole = all(k == REP for k in s.ins)  # every rank computes alike, so nobody owes a reduction
    for have, want, t, param in zip(kinds, s.ins, tensors, params, strict=True):
        if isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim and have.copies > 1:
            if have.copies == want.copies or carried > 1:
                wanted.append(None)
                continue
        elif isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim:
            if have.parts == want.parts:
                wanted.append(None)
                continue
            if have.parts and want.parts:
                regrouped = regroup_parts(have.parts, want.parts)
                if regrouped is not None and len(s.outs) == 1:  # a dim of them opened
                    regrouped = regrouped[:1] if len(set(regrouped)) == 1 else None
                if regrouped is None:
                    return None
                wanted.append(None)
                continue
        step = 0.0 if whole and have == I else _distance(have, want, t, degree)
        if step == _NEVER and param and isinstance(have, Shard) and want == P:
            step = _distance(have, REP, t, degree)
        if step == _NEVER:
            return None
        if param and step > 0 and not replicated(have):
            step += LAST_RESORT
        if want == P and have != P and not param:
            return None  # a replicated activation made partial would flood what follows with partial sums
        cost += step
        wanted.append(None if step == 0 and _holds(have, want) else want)
    outs = s.outs
    if carried > 1:
        outs = tuple(Shard(o.dim, None, carried) for o in outs if isinstance(o, Shard))
    if regrouped:
        outs = tuple(
            Shard(o.dim, own if len(own) > 1 else None) if isinstance(o, Shard) else o
            for o, own in zip(outs, regrouped, strict=True)
        )
    return Choice(s, tuple(wanted), outs, cost)


def _carried(s: Strategy, kinds: Sequence[Kind]) -> int:
    """How many copies of each shard the op's results have, where all its sharded inputs have as many and nothing is summed."""
    held = {
        have.copies
        for have, want in zip(kinds, s.ins, strict=True)
        if isinstance(have, Shard) and isinstance(want, Shard)
    }
    wanted = {want.copies for want in s.ins if isinstance(want, Shard)}
    apart = sum(isinstance(want, Shard) for want in s.ins) != sum(isinstance(have, Shard) for have in kinds)
    if len(held) != 1 or wanted != {1} or apart or not all(isinstance(o, Shard) and o.parts is None for o in s.outs):
        return 1
    return held.pop()


def copies_of(kinds: Sequence[Kind]) -> int:
    """The copies that every sharded kind has alike, else 1."""
    held = {k.copies for k in kinds if isinstance(k, Shard)}
    return held.pop() if len(held) == 1 else 1


def _holds(have: Kind, want: Kind) -> bool:
    return have == want or (want == REP and replicated(have))


def _distance(have: Kind, want: Kind, t: Tensor, degree: int) -> float:
    """Bytes one rank sends, forward plus backward, to bring a value of kind `have` to `want` (0 if it is there already)."""
    grad = t.requires_grad
    size = t.numel() * t.element_size() * (degree - 1) / degree
    if isinstance(have, Shard) and have.copies > 1:
        # Each copy can give up all but its own share; that is free, and whatever follows starts from there.
        if t.shape[have.dim] % degree or (isinstance(want, Shard) and want.copies > 1):
            return _NEVER
        return 0.01 if want == Shard(have.dim) else _distance(Shard(have.dim), want, t, degree)
    if isinstance(want, Shard) and want.copies > 1:
        return _NEVER
    if want == REP:
        if replicated(have):
            return 2 * size if have == I and grad else 0.0
        if isinstance(have, Shard):
            return size * (2 if grad else 1)
        return 2 * size + (2 * size if grad else 0) if have in (P, A) else _NEVER
    if isinstance(want, Shard):
        if replicated(have):
            # Cutting a replicated value is free forward; an invariant one must be gathered in backward.
            return 0.01 + (size if have == I and grad else 0.0)
        if isinstance(have, Shard):
            return 2 * size * (2 if grad else 1)
        return size * (2 if grad else 1) if have == P else _NEVER
    if want == P:
        return 0.0 if have == P else _NEVER if not replicated(have) else 0.02
    if want == A:
        return 0.0 if have == A else _NEVER
    return _NEVER
