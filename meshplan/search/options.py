"""Every way one call can run on one axis: the rules' strategies, with who owns the gradient of what stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from meshplan.compiler import aten, few_heads
from meshplan.compiler.capture import Call, Trace
from meshplan.compiler.experts import CALLS, INSIDE, given_to, strategies
from meshplan.compiler.kinds import A, I, Kind, P, R, replicated
from meshplan.compiler.layout import Axis
from meshplan.compiler.rules import semantic
from meshplan.compiler.rules.base import REP, Strategy, is_float
from meshplan.compiler.strategies import Chooser, reordered
from meshplan.plan.placements import Shard
from meshplan.runtime.comm import AxisGroup
from meshplan.search.program import Program

_TRIED = 400  # layouts of one call's tensors that are followed through its aten ops at most


@dataclass(frozen=True)
class Option:
    """Kinds of a call's tensors, in and out; `share` is the part of the work that one rank does, `replace` the semantic
    operator that runs, and `fused` whether dims sharded in parts pass through it."""

    ins: tuple[Kind, ...]
    outs: tuple[Kind, ...]
    share: float
    replace: str | None = None
    fused: bool = False


def options_of(program: Program, chooser: Chooser, degree: int) -> list[list[Option]]:
    """For every node of `program`, its options on an axis of `degree` ranks; the whole computation is always one."""
    found = []
    for node in program.nodes:
        grads = [program.values[v].grad for v in node.ins], [program.values[v].grad for v in node.outs]
        routed = routed_options(node.call, chooser.trace, *grads, degree)
        found.append(routed or owned(_strategies(chooser, node.call, degree), *grads, degree))
    return found


def routed_options(call: Call, trace: Trace, ins: list[bool], outs: list[bool], degree: int) -> list[Option] | None:
    """The ways to run a call of experts on one axis, None for any other call: on each rank's own tokens, or on tokens that are
    whole and that the operator shares out. Parameters are whole, and their gradients summands.

    Arguments:
        ins, outs: which of its tensors have a gradient.
    """
    if call.func not in CALLS:
        return None
    given = given_to(call)
    weights = tuple(R if grad else I for grad in ins[given:])
    found = [Option((*s.ins[:given], *weights), s.outs, 1 / degree, s.replace) for s in strategies(call, trace, degree)]
    return [*found, Option((*(I,) * given, *weights), (I,) * len(outs), 1 / degree, INSIDE)]


def owned(strategies: Sequence[Strategy], ins: list[bool], outs: list[bool], degree: int) -> list[Option]:
    """`strategies` with gradient ownership spelled out, after the whole computation: alike on all ranks (I), or with
    partial gradients (R). What has no gradient is always I."""
    made: dict[Option, None] = {}
    for letter in (I, R) if any(ins) else (I,):
        whole = tuple(letter if g else I for g in ins), tuple(letter if g else I for g in outs)
        made[Option(*whole, 1.0)] = None
    for s in strategies:
        if len(s.ins) != len(ins) or len(s.outs) != len(outs) or A in (*s.ins, *s.outs) or all(map(replicated, s.ins)):
            continue
        given = tuple((R if g else I) if replicated(k) else k for k, g in zip(s.ins, ins, strict=True))
        results = tuple(
            (k if k == I else R) if replicated(k) and g else I if replicated(k) else k
            for k, g in zip(s.outs, outs, strict=True)
        )
        made[Option(given, results, _share(given, degree), s.replace, not s.plain)] = None
    return list(made)


def _share(ins: Sequence[Kind], degree: int) -> float:
    shards = [k.copies / degree for k in ins if isinstance(k, Shard)]
    return max(shards) if shards else 1.0


def _strategies(chooser: Chooser, rec: Call, degree: int) -> list[Strategy]:
    rule = semantic.RULES.get(rec.func)
    tensors = [chooser.trace.values[v] for v in rec.ins]
    if rule is not None:
        op, order = chooser.semantic_op(rec)
        return [reordered(s, order) for s in rule(op, degree) if len(s.ins) == len(order)]
    ops, _, _ = chooser.decomposed(rec)
    if len(ops) == 1 and ops[0].ins == tuple(map(id, tensors)):
        found = aten.rule_of(ops[0], degree)
        return found + _with_copies(chooser, rec, degree)
    found = []
    tried = [_candidates(t) for t in tensors]
    if len(tensors) > 2:
        layouts = _aligned(tensors)
    else:
        layouts = list(product(*tried))[:_TRIED]
    for kinds in layouts:
        if all(map(replicated, kinds)):
            continue
        s = followed(chooser, rec, kinds, degree)
        if s is not None:
            found.append(s)
    return found + _with_copies(chooser, rec, degree)


def followed(chooser: Chooser, rec: Call, kinds: Sequence[Kind], degree: int) -> Strategy | None:
    """The strategy with exactly these input kinds, if the call's aten ops run on such shards as they stand."""
    ops, results, _ = chooser.decomposed(rec)
    tensors = [chooser.trace.values[v] for v in rec.ins]
    given = {id(t): k for t, k in zip(tensors, kinds, strict=True)}
    outs = aten.follow(ops, given, results, degree)
    if outs is None or not chooser.scales(rec, ops, kinds, degree):
        return None
    return Strategy(tuple(kinds), outs, plain=True)


def _candidates(t: Tensor) -> list[Kind]:
    return [REP, *(Shard(d) for d in range(t.dim()) if t.shape[d] > 1), *([P] if is_float(t) else [])]


def _aligned(tensors: Sequence[Tensor]) -> list[tuple[Kind, ...]]:
    """Layouts of many tensors: all partial, or those of the largest rank sharded alike, counted from the last dim."""
    shapes = [tuple(t.shape) for t in tensors]
    nd = max(len(s) for s in shapes)
    out: list[tuple[Kind, ...]] = [(P,) * len(shapes)]
    for d in range(nd):
        kinds: list[Kind] = []
        for s in shapes:
            own = d - (nd - len(s))
            kinds.append(Shard(own) if own >= 0 and s[own] > 1 else REP)
        out.append(tuple(kinds))
    for j, s in enumerate(shapes):  # one of them alone
        out += [tuple(Shard(d) if i == j else REP for i in range(len(shapes))) for d in range(len(s)) if s[d] > 1]
    return out


def _with_copies(chooser: Chooser, rec: Call, degree: int) -> list[Strategy]:
    """Views as heads that are fewer than the ranks: each head is copied to neighbouring ranks (see few_heads.py)."""
    if rec.name not in few_heads.VIEWS or len(rec.ins) != 1 or len(rec.outs) != 1:
        return []
    x, out = chooser.trace.values[rec.ins[0]], chooser.trace.values[rec.outs[0]]
    axis = Axis("tp", AxisGroup("tp", degree, 0, None), False)
    found = []
    for d in range(x.dim()):
        split = few_heads.needed(rec.name, x, out, Shard(d), axis, frozenset({"x"}))
        if split is None:
            continue
        copies = degree // split.pieces
        for s in _plain(chooser, rec, split.pieces):
            (given,), (made,) = s.ins, s.outs
            if given == Shard(d) and isinstance(made, Shard) and made.parts is None:
                found.append(Strategy((Shard(d, None, copies),), (Shard(made.dim, None, copies),), plain=True))
    return found


def _plain(chooser: Chooser, rec: Call, shards: int) -> list[Strategy]:
    ops, _, _ = chooser.decomposed(rec)
    return aten.rule_of(ops[0], shards) if len(ops) == 1 else []


def copied(program: Program, chooser: Chooser, number: int, copies: int, degree: int) -> list[Option]:
    """Options of node `number` in which every shard has `copies`: its rules with fewer shards, where nothing is summed."""
    node = program.nodes[number]
    grads = [program.values[v].grad for v in node.ins], [program.values[v].grad for v in node.outs]
    out = []
    for s in _strategies(chooser, node.call, degree // copies):
        held = [k for k in (*s.ins, *s.outs) if isinstance(k, Shard)]
        if any(k.copies > 1 or k.parts for k in held) or not all(isinstance(k, Shard) for k in s.outs):
            continue
        if not any(isinstance(k, Shard) for k in s.ins) or P in s.ins or s.replace:
            continue
        ins = tuple(Shard(k.dim, None, copies) if isinstance(k, Shard) else k for k in s.ins)
        outs = tuple(Shard(k.dim, None, copies) for k in s.outs if isinstance(k, Shard))
        out += owned([Strategy(ins, outs, plain=True)], *grads, degree)
    return [o for o in out if any(isinstance(k, Shard) for k in o.ins)]
