"""Placements: what a tensor is on one axis of the mesh, and their one short notation `S(0)`, `R`, `P`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from meshplan.errors import PlanError


class Mirrored(tuple[int, ...]):
    """Sizes of parts, every second of which is dealt to the ranks from the last to the first: the zigzag order of a causal
    sequence, `Mirrored((4, 4))` on 2 ranks is rows 0 1 6 7 and 2 3 4 5. Never equal to a plain tuple of the same sizes."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirrored) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("mirrored", *self))

    def __mul__(self, times: Any) -> Mirrored:
        return Mirrored(tuple(self) * times)

    def __repr__(self) -> str:
        return f"Mirrored({tuple(self)})"


def zigzag(size: int) -> Mirrored:
    """The parts of one sequence of `size`, an even number, in zigzag order."""
    return Mirrored((size // 2, size // 2))


def like_parts(parts: tuple[int, ...], sizes: Iterable[int]) -> tuple[int, ...]:
    """`sizes` as parts dealt as `parts` are."""
    return Mirrored(sizes) if isinstance(parts, Mirrored) else tuple(sizes)


def dealt(parts: tuple[int, ...], part: int, ranks: int, rank: int) -> int:
    """Which of `ranks` equal pieces of part number `part` is that of `rank`."""
    return ranks - 1 - rank if isinstance(parts, Mirrored) and part % 2 else rank


def parts_left(parts: tuple[int, ...], outer: tuple[int, ...] | None, ranks: int) -> tuple[int, ...] | None:
    """The parts of what a rank holds of a dim of `parts`, of which an outer axis of `ranks` cut each of its own `outer` parts
    (None: the dim in one piece); None where that cuts across them, or leaves other ranks other parts."""
    size = sum(parts) // ranks
    if outer is not None and len(outer) > 1:
        ends, own = set(accumulate(outer)), list(accumulate(parts))
        whole = sum(outer) == sum(parts) and ends.issuperset(own) and not any(p % ranks for p in outer)
        return like_parts(parts, (p // ranks for p in parts)) if whole else None
    period = 2 if isinstance(parts, Mirrored) else 1
    if len(set(parts)) > 1 or sum(parts) % ranks or size % (parts[0] * period):
        return None
    return like_parts(parts, parts[: size // parts[0]])


def parts_inside(
    parts: tuple[int, ...], outer: Iterable[tuple[tuple[int, ...] | None, int]]
) -> tuple[int, ...] | None:
    """As `parts_left`, of several outer axes in turn, outermost first: (their parts, their ranks)."""
    left: tuple[int, ...] | None = parts
    for own, ranks in outer:
        left = parts_left(left, own, ranks) if left is not None else None
    return left


@dataclass(frozen=True)
class Shard:
    """Sharded along tensor dim `dim`. `parts` are sizes along that dim that are each split on their own (a fused `q|k|v` or
    `gate|up` parameter), `Mirrored` ones in zigzag order; None means one part. With `copies`, there are fewer shards than
    ranks and each is held by that many neighbouring ranks (kv heads fewer than tp)."""

    dim: int
    parts: tuple[int, ...] | None = None  # kept as given: a subclass of tuple says how parts are dealt
    copies: int = 1

    def __post_init__(self) -> None:
        sizes = () if self.parts is None else self.parts
        if not isinstance(sizes, tuple) or (self.parts is not None and not sizes):
            raise _bad(self.parts, "as parts", "a tuple of sizes along the dim, or None")
        for number in (self.dim, *sizes, self.copies):
            if isinstance(number, bool) or not isinstance(number, int):
                raise _bad(number, "in a shard", "S(<dim>) with an integer dim, parts with integer sizes")
        if any(size < 1 for size in sizes):
            raise _bad(list(sizes), "as parts", "positive sizes")
        if isinstance(sizes, Mirrored) and (len(sizes) % 2 or len(set(sizes)) > 1):
            raise _bad(list(sizes), "as mirrored parts", "an even number of equal sizes")
        if self.copies < 1 or (self.copies > 1 and self.parts):
            raise _bad(self.copies, "as copies", "a positive number, and 1 for a dim with parts")

    def __str__(self) -> str:
        copies = f", copies={self.copies}" if self.copies > 1 else ""
        if self.parts is None:
            return f"S({self.dim}{copies})"
        return f"S({self.dim}, {'zigzag' if isinstance(self.parts, Mirrored) else 'parts'}={list(self.parts)})"

    __repr__ = __str__


@dataclass(frozen=True)
class Replicate:
    """The same full value on every rank of the axis."""

    def __str__(self) -> str:
        return "R"

    __repr__ = __str__


@dataclass(frozen=True)
class Partial:
    """Each rank holds a summand: the true value is the sum over the axis."""

    def __str__(self) -> str:
        return "P"

    __repr__ = __str__


def _bad(value: object, role: str, legal: str) -> PlanError:
    return PlanError(f"{value!r} cannot stand {role}", code="bad-placement", legal=legal)


Placement = Shard | Replicate | Partial
R = Replicate()
P = Partial()


def S(dim: int, parts: tuple[int, ...] | list[int] | None = None) -> Shard:
    """Sharded along `dim`; with `parts`, each of the fused parts is split on its own."""
    return Shard(dim, tuple(parts) if parts is not None else None)


_SHARD = re.compile(r"S\(\s*(-?\d+)\s*(?:,\s*(?:(parts|zigzag)\s*=\s*\[([\d,\s]+)\]|copies\s*=\s*(\d+))\s*)?\)")


def parse_placement(text: str) -> Placement:
    """`S(0)`, `S(0, parts=[8, 8, 8])`, `S(1, zigzag=[8, 8])`, `S(0, copies=2)`, `R` or `P` as a placement. Raises PlanError
    for anything else."""
    text = text.strip()
    if text == "R":
        return R
    if text == "P":
        return P
    match = _SHARD.fullmatch(text)
    if match:
        sizes = [int(n) for n in match[3].split(",") if n.strip()] if match[3] else []
        parts = Mirrored(sizes) if match[2] == "zigzag" else tuple(sizes)
        return Shard(int(match[1]), parts or None, int(match[4] or 1))
    raise PlanError(f"{text!r} is not a placement", code="bad-placement", legal="S(<dim>), R or P")
