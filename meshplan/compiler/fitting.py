"""Exact fits of integer counts over a grid of probe points: products of powers of the variables, and sums of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product

import sympy

Point = Mapping[str, int]
Key = tuple[tuple[str, int], ...]
"""A point as something to look up: its items in order."""

EXPONENTS = (0, 1, -1, 2, -2)


class Unfit(Exception):
    """No sum of products of powers gives these counts; the text says in which variable."""


def key_of(point: Point) -> Key:
    return tuple(sorted(point.items()))


def symbols(names: Sequence[str]) -> dict[str, sympy.Symbol]:
    """A positive integer symbol for each variable."""
    return {name: sympy.Symbol(name, positive=True, integer=True) for name in names}


def fit(
    base: Point, lines: Mapping[str, Sequence[int]], powers: Mapping[str, int], value: Callable[[Point], int]
) -> sympy.Expr:
    """The expression of a count, from its values on the lines through `base` along each variable.

    A variable enters as a pure power (exponents -2 to 2), or as `alpha + beta v^p`; terms of several such variables are
    told apart at the corners of their grid. Two values fix a pure power and check it, a sum needs a third for that.

    Arguments:
        base: a value for every variable.
        lines: for each variable that may vary, further values of it.
        powers: for each variable, the power `p` that a sum has beside a constant.
        value: the count at a point that differs from `base` in variables of `lines`.

    Raises Unfit.
    """
    at = symbols(list(base))
    here = value(base)
    pure: dict[str, int] = {}
    mixed: list[str] = []
    for name, more in lines.items():
        samples = [(base[name], here)] + [(v, value({**base, name: v})) for v in more]
        exponent = _pure(samples)
        if exponent is not None:
            pure[name] = exponent
        elif len(samples) >= 3 and _affine(samples, powers[name]):
            mixed.append(name)
        else:
            raise Unfit(f"in {name} it is {', '.join(f'{f} at {v}' for v, f in samples)}")
    factor = sympy.Integer(1)
    for name, exponent in pure.items():
        factor *= (at[name] / base[name]) ** exponent
    return sympy.expand(factor * _corners(base, {name: lines[name][0] for name in mixed}, powers, value, at))


def _pure(samples: Sequence[tuple[int, int]]) -> int | None:
    (v0, f0), rest = samples[0], samples[1:]
    for exponent in EXPONENTS:
        if all(Fraction(f) == f0 * Fraction(v, v0) ** exponent for v, f in rest):
            return exponent
    return None


def _affine(samples: Sequence[tuple[int, int]], power: int) -> bool:
    (v0, f0), (v1, f1) = samples[:2]
    x0, x1 = Fraction(v0) ** power, Fraction(v1) ** power
    slope = (f1 - f0) / (x1 - x0)
    return all(f == f0 + slope * (Fraction(v) ** power - x0) for v, f in samples[2:])


def _corners(
    base: Point,
    other: Mapping[str, int],
    powers: Mapping[str, int],
    value: Callable[[Point], int],
    at: Mapping[str, sympy.Symbol],
) -> sympy.Expr:
    """The multilinear interpolation in `v^p` of the variables of `other`, between base and their other value."""
    total = sympy.Integer(0)
    for choice in product((False, True), repeat=len(other)):
        point, weight = dict(base), sympy.Integer(1)
        for (name, far), moved in zip(other.items(), choice, strict=True):
            p = powers[name]
            x0, x1 = sympy.Rational(base[name]) ** p, sympy.Rational(far) ** p
            x = at[name] ** p
            weight *= (x - x0) / (x1 - x0) if moved else (x - x1) / (x0 - x1)
            if moved:
                point[name] = far
        total += weight * value(point)
    return sympy.expand(total)


def evaluate(expression: sympy.Expr, point: Point) -> sympy.Expr:
    """The expression with numbers for all its symbols."""
    return expression.subs({s: point[s.name] for s in expression.free_symbols})
