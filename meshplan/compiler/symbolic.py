"""Symbolic counts: each collective's elements as an expression in batch, sequence and axis degrees, fitted and checked.

The program is lowered again at probe points. A count is fitted exactly (rational coefficients), or for FSDP built from
the unit's parameters with their padding, and has to hold at the plan's own point and at one that no fit has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from torch import nn

from meshplan.compiler.commgraph import Collective, collectives, fsdp_of
from meshplan.compiler.divisors import Divided, conditions, divided
from meshplan.compiler.fitting import Point, Unfit, evaluate, fit, symbols
from meshplan.compiler.lowered import Core
from meshplan.compiler.probes import BATCH, SEQUENCE, Prober, further, ids

# Room for degrees: a batch and a sequence that 2, 3 and 4 times as many ranks still divide.
ROOM = 12
Value = Callable[[Point], int]


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


@dataclass(frozen=True)
class _Grid:
    """Values of each variable beside those of the base point, and points that are on no line of them."""

    lines: dict[str, list[int]]
    unseen: list[dict[str, int]]


def symbolic_counts(model: nn.Module, core: Core) -> Counts:
    """Fit every count of `core`; lowers the plan some ten times. `model` is the single-device module, on meta."""
    prober = Prober(model, core)
    here = prober.here()
    base = _base(prober, here)
    held = divided(prober, base)
    tried = {name: further(prober, base, name, _candidates(name, base, here, held)) for name in base}
    lines = {name: good for name, (good, _) in tried.items() if good}
    even = {name: [v for v in good if _divides(name, v, base, held)] for name, good in lines.items()}
    grids = [_grid(prober, base, lines), _grid(prober, base, {name: good for name, good in even.items() if good})]
    sent = collectives(model, core)
    expressions: dict[str, sympy.Expr] = {}
    unfitted: dict[str, str] = {}
    for name, c in zip(ids(sent), sent, strict=True):
        try:
            expressions[name] = _checked(c, model, core, base, here, grids, _value(prober, name))
        except Unfit as why:
            unfitted[name] = str(why)
    return Counts(expressions, conditions(held, base, here, tried, bool(grids[0].unseen)), unfitted)


def _value(prober: Prober, name: str) -> Value:
    def value(point: Point) -> int:
        probe = prober.at(point)
        if probe is None or name not in probe.elements:
            raise Unfit(f"the plan is another program at {dict(point)}")
        return probe.elements[name]

    return value


def _base(prober: Prober, here: Point) -> dict[str, int]:
    """The point that lines start from: the plan's own degrees, with as much room in batch and sequence as lowers."""
    for grown in ((BATCH, SEQUENCE), (BATCH,), (SEQUENCE,)):
        point = {name: v * ROOM if name in grown else v for name, v in here.items()}
        if _same(prober, here, point):
            return point
    return dict(here)


def _same(prober: Prober, a: Point, b: Point) -> bool:
    """Whether the plan lowers at both points, to the same collectives."""
    first, second = prober.at(a), prober.at(b)
    return first is not None and second is not None and list(first.elements) == list(second.elements)


def _candidates(name: str, base: Point, here: Point, held: Divided) -> list[int]:
    """Other values of a variable; of a degree first those that divide all that the present one divides."""
    n = base[name]
    if name in (BATCH, SEQUENCE):
        return [v for v in dict.fromkeys((2 * n, 3 * n, here[name], n // 2, n // 3)) if v not in (0, n)]
    near = [v for v in dict.fromkeys((2 * n, n // 2, 4 * n, 3 * n, 2, 3, 4, 6, 8)) if v not in (0, 1, n)]
    return sorted(near, key=lambda v: not _divides(name, v, base, held))[:5]


def _divides(name: str, v: int, base: Point, held: Divided) -> bool:
    many = [s for axes, sizes in held.items() if name in axes.split("*") for s in sizes]
    return all((base[s] if isinstance(s, str) else s) % v == 0 for s in many)


def _grid(prober: Prober, base: Point, lines: dict[str, list[int]]) -> _Grid:
    for pick in (-1, 0):
        point = dict(base) | {name: more[pick] for name, more in lines.items()}
        if _same(prober, base, point):
            return _Grid(lines, [point])
    return _Grid(lines, [])


def _checked(
    c: Collective, model: nn.Module, core: Core, base: Point, here: Point, grids: list[_Grid], value: Value
) -> sympy.Expr:
    """The expression over all values, or else over those degrees that divide what they divide now. Raises Unfit."""
    powers = {name: 1 if name in (BATCH, SEQUENCE) else -1 for name in base}
    first: Unfit | None = None
    for grid in grids:
        try:
            expression = _expression(c, model, core, base, grid.lines, powers, value)
            for point in [here, *grid.unseen]:
                if evaluate(expression, point) != value(point):
                    raise Unfit(f"{expression} does not hold at {dict(point)}")
            return expression
        except Unfit as why:
            first = first or why
    raise first or Unfit("no value was seen")


def _expression(
    c: Collective,
    model: nn.Module,
    core: Core,
    base: Point,
    lines: Mapping[str, list[int]],
    powers: Mapping[str, int],
    value: Value,
) -> sympy.Expr:
    try:
        return fit(base, lines, powers, value)
    except Unfit:
        points = [base, *({**base, name: v} for name, more in lines.items() for v in more)]
        for candidate in _unit_elements(c, model, core, base):
            if all(evaluate(candidate, p) == value(p) for p in points):
                return candidate
        raise


def _unit_elements(c: Collective, model: nn.Module, core: Core, base: Point) -> list[sympy.Expr]:
    """What FSDP may send for a unit, from its parameters: dim 0 padded to a multiple of the shard ranks, uneven tensor
    splits counted as the first rank's. All of them, those that are trained, and the part that replicas reduce."""
    units, policy = fsdp_of(model, core)
    unit = next((u for u in units if u.path == c.module), None)
    if c.what != "fsdp" or unit is None or policy is None or unit.shard:
        return []
    at = symbols(list(base))
    n: sympy.Expr = sympy.Mul(*(at[axis] for axis in ("dp_shard", "cp") if axis in at))
    everything, trained = sympy.Integer(0), sympy.Integer(0)
    for p in unit.params:
        plan = core.params[p.name]
        sizes = [sympy.Integer(s) for s in plan.shape]
        for axis, shard in plan.shards:
            pieces = [sympy.Integer(s) for s in shard.parts] if shard.parts else [sizes[shard.dim]]
            sizes[shard.dim] = sympy.Add(*(_split(size, at[axis], core.spec.degree(axis)) for size in pieces))
        if p.local_shape and p.local_shape[p.shard_dim] % policy.shard:
            sizes[p.shard_dim] = n * sympy.ceiling(sizes[p.shard_dim] / n)
        everything += sympy.Mul(*sizes)
        trained += sympy.Mul(*sizes) if p.requires_grad and p.used else 0
    return [sympy.expand(e / part) for e in (everything, trained) for part in (sympy.Integer(1), n)]


def _split(size: sympy.Expr, axis: sympy.Symbol, degree: int) -> sympy.Expr:
    return size / axis if size.is_Integer and int(size) % degree == 0 else sympy.ceiling(size / axis)
