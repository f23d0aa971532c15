"""Finding the strategy of one recorded call: its own rule, or that of the aten ops it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan import compat
from meshplan.compiler import aten, experts
from meshplan.compiler.capture import Call, Ref, Trace
from meshplan.compiler.context import MARK, ContextAt, inner_of, method_of, transport_of
from meshplan.compiler.edits import Replacement
from meshplan.compiler.equal_heads import EqualHeads
from meshplan.compiler.experts import ExpertsAt
from meshplan.compiler.kinds import Kind, replicated, splits
from meshplan.compiler.layout import Axis
from meshplan.compiler.match import Choice, choose, copies_of
from meshplan.compiler.rules import semantic
from meshplan.compiler.rules.base import MISSING, REP, Op, Strategy
from meshplan.errors import PlanError
from meshplan.mesh.build import Groups
from meshplan.ops.attention.legal import check_heads, spared_heads
from meshplan.ops.experts.block import block_call
from meshplan.plan.placements import Mirrored, Shard
from meshplan.runtime import replace
from meshplan.runtime.comm import chunk_size


class Chooser:
    """Strategies for the calls of one trace. Recorded aten ops are kept, since every pass and every axis asks again.

    Attributes:
        merged: (call, number of its result) of repeated key heads of which an operator takes, and gives a gradient to, one a run.
    """

    def __init__(
        self, trace: Trace, groups: Groups, context: ContextAt | None = None, routed: ExpertsAt | None = None
    ) -> None:
        self.trace, self.groups, self.context, self.routed = trace, groups, context, routed
        self._ops: dict[int, tuple[Op, list[int]]] = {}
        self._aten: dict[int, tuple[list[aten.AtenOp], list[Tensor], list[Tensor]]] = {}
        self._equal: EqualHeads | None = None
        self.merged: frozenset[tuple[int, int]] = frozenset()

    def choose(
        self, rec: Call, kinds: Sequence[Kind], params: Sequence[bool], degree: int, requires: Sequence[bool], axis: str = ""
    ) -> Choice | None:
        """The cheapest way to run `rec` on one axis, its `wanted` in the order of the call's tensors."""
        if idle(rec):
            return Choice(Strategy(tuple(kinds), tuple(kinds)), (None,), tuple(kinds), 0.0)
        outs = len(rec.outs)
        whole = Strategy((REP,) * len(kinds), (REP,) * outs)
        tensors = [self.trace.values[v] for v in rec.ins]
        shards = degree // copies_of(kinds)
        if rec.func in experts.CALLS:
            return choose(experts.strategies(rec, self.trace, shards), kinds, tensors, params, degree)
        rule = semantic.RULES.get(rec.func)
        if rule is not None:
            op, order = self.semantic_op(rec)
            found = rule(op, shards)
            if rec.func in semantic.OVER and self.context and self.context.covers(axis, rec.module):
                found = [*semantic.OVER[rec.func](op, self.context.operator), *found]
            strategies = [reordered(s, order) for s in found if len(s.ins) == len(order)]
            return choose([*strategies, whole], kinds, tensors, params, degree, rec.in_place)
        ops, results, _ = self.decomposed(rec)
        given = {id(t): k for t, k in zip(tensors, kinds, strict=True)}
        strategies = []
        followed = aten.follow(ops, given, results, degree)
        if followed is not None and (len(ops) == 1 or self.scales(rec, ops, kinds, degree)):
            strategies.append(Strategy(tuple(REP if replicated(k) else k for k in kinds), followed, plain=True))
        elif len(ops) == 1 and ops[0].ins == tuple(id(t) for t in tensors):
            strategies += aten.rule_of(ops[0], shards)
        return choose([*strategies, whole], kinds, tensors, params, degree, rec.in_place)

    def splits_whole(self, rec: Call, axis: Axis) -> bool:
        """Whether the operator in place of `rec` shares out its arguments over an axis on which all of them are whole: a token
        would be routed by each of its ranks otherwise. Raises PlanError `experts-tokens` where it could not."""
        return rec.func in experts.CALLS and self.routed is not None and self.routed.shares_out(rec, axis)

    def semantic_op(self, rec: Call) -> tuple[Op, list[int]]:
        """`rec` with its arguments in signature order, and for each tensor its number in the call."""
        if rec.index not in self._ops:
            numbered: list[Any] = []
            for leaf in rec.leaves:
                numbered.append(
                    _Slot(sum(isinstance(x, _Slot) for x in numbered), leaf.value) if isinstance(leaf, Ref) else leaf
                )
            args, kwargs = compat.unflatten(numbered, rec.structure)
            full = list(bind_arguments(rec.func, args, kwargs))
            if rec.func is torch.Tensor.__rmatmul__:
                full.reverse()
            slots = [x for x in compat.flatten(full)[0] if isinstance(x, _Slot)]
            plain = [self.trace.values[x.value] if isinstance(x, _Slot) else x for x in full]
            ins = tuple(self.trace.values[s.value] for s in slots)
            outs = tuple(self.trace.values[v] for v in rec.outs)
            self._ops[rec.index] = (Op(rec.name, tuple(plain), {}, ins, outs), [s.number for s in slots])
        return self._ops[rec.index]

    def scales(self, rec: Call, ops: list[aten.AtenOp], kinds: Sequence[Kind], degree: int) -> bool:
        """Whether shards take the same aten ops with the same numbers: a function may divide by a size it was handed."""
        mine: dict[int, Tensor] = {}
        for value, kind in zip(rec.ins, kinds, strict=True):
            t = self.trace.values[value]
            if isinstance(kind, Shard):
                pieces = kind.parts or (t.shape[kind.dim],)
                t = t.detach().narrow(kind.dim, 0, sum(chunk_size(piece, degree, 0) for piece in pieces))
            mine[value] = t
        leaves = [mine[x.value] if isinstance(x, Ref) else x for x in rec.leaves]
        args, kwargs = compat.unflatten(leaves, rec.structure)
        try:
            local, _, _ = aten.decompose(rec.func, args, kwargs)
        except (RuntimeError, ValueError):  # sizes written in the call, which the rank's own will replace
            return True
        return [aten.numbers(item) for item in local] == [aten.numbers(item) for item in ops]

    def decomposed(self, rec: Call) -> tuple[list[aten.AtenOp], list[Tensor], list[Tensor]]:
        if rec.index not in self._aten:
            leaves = [self.trace.values[x.value] if isinstance(x, Ref) else x for x in rec.leaves]
            args, kwargs = compat.unflatten(leaves, rec.structure)
            self._aten[rec.index] = aten.decompose(rec.func, args, kwargs)
        return self._aten[rec.index]

    def replacement(
        self, rec: Call, names: set[str], chosen: dict[str, Strategy], axes: list[Axis]
    ) -> Replacement | None:
        """The semantic operator that must run in place of `rec`, with its settings; None where the call can stay."""
        if rec.func in experts.CALLS:
            assert self.routed is not None
            inside = tuple(axis for axis, s in chosen.items() if s.replace == experts.INSIDE)
            ranks = math.prod(a.degree for a in axes if a.name in chosen)
            if rec.func is block_call:
                law, tokens = experts.law_of(rec, self.trace)
                return self.routed.block_replacement(rec.module, inside, tuple(chosen), law, tokens, ranks)
            tokens, indices = (self.trace.values[v] for v in rec.ins[:2])
            return self.routed.replacement(rec.module, inside, tokens, indices, ranks)
        over = next(((axis, s) for axis, s in chosen.items() if s.replace and s.replace.startswith(MARK)), None)
        if over is not None:
            return self._over_context(rec, *over, chosen, axes)
        if rec.func in (F.dropout, F.scaled_dot_product_attention):
            op, _ = self.semantic_op(rec)
            p = op.arg(1, "p", 0.5) if rec.func is F.dropout else op.arg(4, "dropout_p", 0.0)
            live = p > 0 and (rec.func is not F.dropout or op.arg(2, "training", True))
            if not live:
                return None
            # Dropout is always ours: torch's generator differs from rank to rank and from one device.
            shape = tuple(op.ins[0].shape)
            if rec.func is not F.dropout:
                shape = (*shape[:-1], op.ins[1].shape[-2])
            shards = _shards(chosen)
            name = "dropout" if rec.func is F.dropout else "attention_dropout"
            return Replacement(name, (("module", rec.module), ("global_shape", shape), ("shards", shards)))
        if not names:
            return None
        (name,) = names
        op, _ = self.semantic_op(rec)
        if name == "flex_attention":
            return Replacement(name, (("global_shape", tuple(op.ins[0].shape)), ("shards", _shards(chosen))))
        split: dict[str, list[str]] = {}
        for axis, s in chosen.items():
            if name == "embedding" and s.ins[1] == Shard(0):
                split.setdefault("rows", []).append(axis)
            elif name == "cross_entropy":
                classes = 0 if op.ins[0].dim() == 1 else 1
                split.setdefault("classes" if s.ins[0] == Shard(classes) else "tokens", []).append(axis)
            elif name == "split_norm" and isinstance(s.ins[0], Shard) and s.ins[0].dim == op.ins[0].dim() - 1:
                split.setdefault("normed", []).append(axis)
        sizes = {
            "embedding": lambda: op.ins[1].shape[0],
            "cross_entropy": lambda: op.ins[0].shape[0 if op.ins[0].dim() == 1 else 1],
            "split_norm": lambda: op.ins[0].shape[-1],
        }
        settings = tuple((k, tuple(v)) for k, v in sorted(split.items()))
        return Replacement(name, (*settings, ("size", int(sizes[name]()))))

    def _over_context(
        self, rec: Call, axis: str, s: Strategy, chosen: dict[str, Strategy], axes: list[Axis]
    ) -> Replacement:
        """Attention over a sequence split on `axis`, with the settings of its method and of dropout on the probabilities."""
        op, _ = self.semantic_op(rec)
        q, k = op.ins[0], op.ins[1]
        method, inner = method_of(s.replace or ""), inner_of(s.replace)
        degrees = {a.name: a.degree for a in axes}
        equal = self._equal_heads(rec, chosen)
        split = math.prod(degrees[a] for a, other in chosen.items() if a != axis and splits(other.outs[0], 1))
        few = max((o.ins[1].copies for o in chosen.values() if isinstance(o.ins[1], Shard)), default=1)
        heads = max(k.shape[1] * few // split, 1)
        try:
            check_heads(q.shape[1] // split, heads, degrees[axis], method, inner)
        except PlanError as error:
            raise error.at(rec.where, rec.module) from None
        sent = spared_heads(heads, equal, {"ulysses": degrees[axis], "hybrid": inner}.get(method) or 1)
        if sent > 1 and self._equal is not None:
            self.merged |= self._equal.repeated
        held = s.outs[0]
        order = "zigzag" if isinstance(held, Shard) and isinstance(held.parts, Mirrored) else "contiguous"
        return Replacement(
            "context_attention",
            (
                ("module", rec.module), ("axis", axis), ("method", method), ("inner", inner),
                ("size", int(q.shape[-2])), ("order", order), ("global_shape", (*q.shape[:-1], int(k.shape[-2]))),
                ("shards", tuple(pair for pair in _shards(chosen) if pair[0] != axis)),
                ("equal_heads", sent), ("transport", transport_of(s.replace or "")),
            ),
        )  # fmt: skip

    def _equal_heads(self, rec: Call, chosen: Mapping[str, Strategy]) -> int:
        """How many neighbouring key heads, and value heads, the program makes equal; 1 where an axis splits them otherwise than
        in one stretch a rank."""
        _, order = self.semantic_op(rec)
        for s in chosen.values():
            if any(isinstance(kind, Shard) and kind.dim == 1 and (kind.parts or kind.copies > 1) for kind in s.ins[1:3]):
                return 1
        self._equal = self._equal or EqualHeads(self.trace, self.decomposed)
        return math.gcd(*(self._equal.runs(rec.ins[number], 1) for number in order[1:3]))

    def run_replacement(self, r: Replacement, rec: Call, args: Any, kwargs: Any, axes: list[Axis]) -> Any:
        """Run the operator on fake local tensors over abstract groups."""
        return replace.bind(r.name, dict(r.settings), self.groups, None)(rec.func, args, kwargs)


def _shards(chosen: Mapping[str, Strategy]) -> tuple[tuple[str, Any], ...]:
    """The result's shards: axes with the dim that they split, outermost first."""
    return tuple((name, s.outs[0]) for name, s in chosen.items() if isinstance(s.outs[0], Shard))


def idle(rec: Call) -> bool:
    """Whether a call returned the very tensor it was handed: dropout in evaluation, a cast to the dtype that it has."""
    return len(rec.ins) == 1 and rec.outs == rec.ins


def bind_arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Positional arguments in the order of the function's signature; `MISSING` where one was left out before another."""
    names = semantic.SIGNATURES.get(func)
    if names is None or not kwargs:
        return tuple(args)
    full = list(args) + [MISSING] * (len(names) - len(args))
    for key, value in kwargs.items():
        full[names.index(key)] = value
    while full and full[-1] is MISSING:
        full.pop()
    return tuple(full)


class _Slot:
    def __init__(self, number: int, value: int) -> None:
        self.number, self.value = number, value


def reordered(s: Strategy, order: list[int]) -> Strategy:
    ins: list[Kind] = [REP] * len(order)
    for kind, number in zip(s.ins, order, strict=True):
        ins[number] = kind
    return Strategy(tuple(ins), s.outs, s.replace, s.plain)
