"""Symbolic counts: each collective's elements as an expression in batch, sequence and axis degrees, fitted and checked.

The program is lowered again at probe points. A count is fitted exactly (rational coefficients), or for FSDP built from the
unit's parameters with their padding, and has to hold at the plan's own point and at one that no fit has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import sympy
from torch import nn

from meshplan.compiler.commgraph import DATA, Collective, collectives, fsdp_of
from meshplan.compiler.fitting import Point, Unfit, evaluate, fit, symbols
from meshplan.compiler.lowered import Core
from meshplan.compiler.probes import BATCH, SEQUENCE, Prober, further, ids

POWERS = {BATCH: 1, SEQUENCE: 1}
# Room for degrees: a batch and a sequence that 2, 3 and 4 times as many ranks still divide.
ROOM = 12


@dataclass(frozen=True)
class Counts:
    """Symbolic counts of one lowered program.

    Attributes:
        expressions: elements by collective id, over symbols `b` (batch), `s` (sequence), both global, and axis names.
        conditions: what the expressions rest on, as text.
        unfitted: why a collective has no expression, by id.
    """

    expressions: dict[str, sympy.Expr]
    conditions: tuple[str, ...]
    unfitted: dict[str, str]


def symbolic_counts(model: nn.Module, core: Core) -> Counts:
    """Fit every count of `core`; lowers the plan some ten times. `model` is the single-device module, on meta."""
    prober = Prober(model, core)
    here = prober.here()
    base = _base(prober, here)
    held = _divided(prober, base)
    tried = {name: further(prober, base, name, _candidates(name, base, here, held)) for name in base}
    lines = {name: good for name, (good, _) in tried.items() if good}
    powers = {name: POWERS.get(name, -1) for name in base}
    unseen = _unseen(prober, base, lines)
    sent = collectives(model, core)
    found = dict(zip(ids(sent), sent, strict=True))
    expressions: dict[str, sympy.Expr] = {}
    unfitted: dict[str, str] = {}
    for name, c in found.items():
        def value(point: Point, name: str = name) -> int:
            probe = prober.at(point)
            if probe is None or name not in probe.elements:
                raise Unfit(f"the plan is another program at {dict(point)}")
            return probe.elements[name]

        try:
            expression = _expression(c, model, core, base, lines, powers, value)
            for point in [here, *unseen]:
                if evaluate(expression, point) != value(point):
                    raise Unfit(f"{expression} does not hold at {dict(point)}")
        except Unfit as why:
            unfitted[name] = str(why)
        else:
            expressions[name] = expression
    return Counts(expressions, tuple(_conditions(held, base, here, tried, bool(unseen))), unfitted)


def _base(prober: Prober, here: Point) -> dict[str, int]:
    """The point that lines start from: the plan's own degrees, with as much room in batch and sequence as lowers."""
    home = prober.at(here)
    for grown in ((BATCH, SEQUENCE), (BATCH,), (SEQUENCE,)):
        point = {name: v * ROOM if name in grown else v for name, v in here.items()}
        probe = prober.at(point)
        if probe is not None and home is not None and list(probe.elements) == list(home.elements):
            return point
    return dict(here)


def _candidates(name: str, base: Point, here: Point, held: dict[str, list[int | str]]) -> list[int]:
    """Other values of a variable: degrees that still divide what the present one divides, near ones first."""
    n = base[name]
    if name in POWERS:
        return [v for v in dict.fromkeys((2 * n, 3 * n, here[name], n // 2, n // 3)) if v not in (0, n)]
    sizes = [base[s] if isinstance(s, str) else s for axes, many in held.items() if name in axes.split("*") for s in many]
    near = [v for v in (2 * n, n // 2, 4 * n, 3 * n, 2, 3, 4, 6, 8) if v not in (0, 1, n)]
    return [v for v in dict.fromkeys(near) if all(s % v == 0 for s in sizes)][:5]


def _unseen(prober: Prober, base: Point, lines: dict[str, list[int]]) -> list[dict[str, int]]:
    """A point off every line and corner that the fits use, or none where the plan lowers at none of them."""
    for pick in (-1, 0):
        point = dict(base) | {name: more[pick] for name, more in lines.items()}
        home, probe = prober.at(base), prober.at(point)
        if probe is not None and home is not None and list(probe.elements) == list(home.elements):
            return [point]
    return []


def _expression(
    c: Collective, model: nn.Module, core: Core, base: Point, lines: dict[str, list[int]], powers: dict[str, int], value: Callable[[Point], int]
) -> sympy.Expr:
    try:
        return fit(base, lines, powers, value)
    except Unfit:
        for candidate in _unit_elements(c, model, core, base):
            points = [base, *({**base, name: v} for name, more in lines.items() for v in more)]
            if all(evaluate(candidate, p) == value(p) for p in points):
                return candidate
        raise


def _unit_elements(c: Collective, model: nn.Module, core: Core, base: Point) -> list[sympy.Expr]:
    """What FSDP may send for a unit, from its parameters: dim 0 padded to a multiple of the shard ranks, uneven tensor
    splits counted as the first rank's. All of them, those that are trained, and the part that replicas reduce."""
    units, policy = fsdp_of(model, core)
    unit = next((u for u in units if u.path == c.module), None)
    if c.what != "fsdp" or unit is None or policy is None:
        return []
    at = symbols(list(base))
    n: sympy.Expr = sympy.Integer(1)
    for axis in ("dp_shard", "cp"):
        n = n * at.get(axis, 1)
    whole = [sympy.Integer(0), sympy.Integer(0)]
    for p in unit.params:
        plan = core.params[p.name]
        sizes = [sympy.Integer(s) for s in plan.shape]
        for axis, shard in plan.shards:
            pieces = [sympy.Integer(s) for s in shard.parts] if shard.parts else [sizes[shard.dim]]
            sizes[shard.dim] = sympy.Add(*(_split(size, at[axis], core.spec.degree(axis)) for size in pieces))
        if p.local_shape and p.local_shape[p.shard_dim] % policy.shard:
            sizes[p.shard_dim] = n * sympy.ceiling(sizes[p.shard_dim] / n)
        elements = sympy.Mul(*sizes)
        whole[0] += elements
        whole[1] += elements if p.requires_grad and p.used else 0
    return [sympy.expand(e / part) for e in whole for part in (sympy.Integer(1), n)]


def _split(size: sympy.Expr, axis: sympy.Symbol, degree: int) -> sympy.Expr:
    return size / axis if size.is_Integer and int(size) % degree == 0 else sympy.ceiling(size / axis)


def _conditions(held: dict[str, list[int | str]], base: Point, here: Point, tried: dict[str, tuple[list[int], list[int]]], checked: bool) -> list[str]:
    """Divisibility, and the values of each variable at which the program is known to be this one."""
    out = []
    for axes, sizes in held.items():
        numbers = sorted({s for s in sizes if isinstance(s, int)})
        texts = sorted({s for s in sizes if isinstance(s, str)})
        if numbers:
            of = f" (all of {', '.join(map(str, numbers))})" if len(numbers) > 1 else ""
            texts.append(f"{gcd(*numbers)}{of}")
        out += [f"{axes} divides {text}" for text in texts]
    for name, (good, bad) in tried.items():
        values = ", ".join(map(str, sorted({base[name], here[name], *good})))
        if not good:
            out.append(f"{name} = {here[name]}: " + (f"another program, or none, at {', '.join(map(str, bad))}" if bad else "no other value"))
        else:
            out.append(f"{name} fitted at {values}" + (f"; another program, or none, at {', '.join(map(str, bad))}" if bad else ""))
    if not checked:
        out.append("no point off the fitted lines could be lowered: products of powers are assumed")
    return out


def _divided(prober: Prober, base: Point) -> dict[str, list[int | str]]:
    """What each axis has to divide for the expressions to hold: numbers (dims of parameters) and `b`, `s` (of inputs and
    activations). Sizes that it does not divide now are cut unevenly and do not count."""
    core, found = prober.core, dict[str, list[int | str]]()
    degree = core.spec.degree
    for plan in core.params.values():
        for axis, shard in plan.shards:
            for size in shard.parts or (plan.shape[shard.dim],):
                if size % degree(axis) == 0:
                    found.setdefault(axis, []).append(size)
    for e in core.examples.values():
        for leaf in e.leaves:
            for d, role in enumerate(prober.roles.get(leaf.key, ())):
                axes = [a for a, k in zip(core.program.axes, leaf.kinds, strict=True) if getattr(k, "dim", None) == d]
                if role and axes:
                    found.setdefault("*".join(axes), []).append(role)
    probe = prober.at(base)
    for b in probe.core.program.boundaries if probe else ():
        if "S" in (b.move.src, b.move.dst) and b.move.axis not in DATA and b.move.size % degree(b.move.axis) == 0:
            size: int | str = SEQUENCE if SEQUENCE in base and b.move.size == base[SEQUENCE] else b.move.size
            if size == SEQUENCE or b.move.size % base.get(BATCH, b.move.size + 1):
                found.setdefault(b.move.axis, []).append(size)
    units, policy = fsdp_of(prober.model, core)
    for p in (p for u in units for p in u.params):
        if policy and policy.shard > 1 and p.local_shape[p.shard_dim] % policy.shard == 0:
            axes_text = "*".join(a for a in ("dp_shard", "cp") if degree(a) > 1)
            found.setdefault(axes_text, []).append(p.local_shape[p.shard_dim])
    return found
