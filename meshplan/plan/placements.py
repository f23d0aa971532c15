"""Placements: what a tensor is on one axis of the mesh, and their one short notation `S(0)`, `R`, `P`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshplan.errors import PlanError


@dataclass(frozen=True)
class Shard:
    """Sharded along tensor dim `dim`. `parts` are sizes along that dim that are each split on their own
    (a fused `q|k|v` or `gate|up` parameter); None means one part. With `copies`, there are fewer shards than ranks and each
    is held by that many neighbouring ranks (kv heads fewer than tp)."""

    dim: int
    parts: tuple[int, ...] | None = None
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
        if self.copies < 1 or (self.copies > 1 and self.parts):
            raise _bad(self.copies, "as copies", "a positive number, and 1 for a dim with parts")

    def __str__(self) -> str:
        copies = f", copies={self.copies}" if self.copies > 1 else ""
        return f"S({self.dim}{copies})" if self.parts is None else f"S({self.dim}, parts={list(self.parts)})"

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


_SHARD = re.compile(r"S\(\s*(-?\d+)\s*(?:,\s*(?:parts\s*=\s*\[([\d,\s]+)\]|copies\s*=\s*(\d+))\s*)?\)")


def parse_placement(text: str) -> Placement:
    """`S(0)`, `S(0, parts=[8, 8, 8])`, `S(0, copies=2)`, `R` or `P` as a placement. Raises PlanError for anything else."""
    text = text.strip()
    if text == "R":
        return R
    if text == "P":
        return P
    match = _SHARD.fullmatch(text)
    if match:
        parts = [int(n) for n in match[2].split(",") if n.strip()] if match[2] else None
        return Shard(int(match[1]), tuple(parts) if parts else None, int(match[3] or 1))
    raise PlanError(f"{text!r} is not a placement", code="bad-placement", legal="S(<dim>), R or P")
