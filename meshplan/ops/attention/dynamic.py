"""Context parallelism of each sample's own degree: a long sample over many ranks, a short one on one, and equal work for all.

1. Each sample gets the fewest ranks on which its rows fit, and on which no rank's share of its work is above a cap.
2. Samples are placed one by one, those on more ranks first, then the heavier, where they make the slowest rank of a wave slower
   by the least, and among such places where there is least work. Groups of ranks nest, so larger samples leave no holes.
3. Of several caps the highest is taken whose placement is within a hundredth of the fastest: more ranks exchange more.
4. While it saves more than a hundredth of a step, one of the heaviest samples of a slowest rank gets more ranks.

Work is counted in FLOPs, attention's with the square of the length; a step takes as long as the slowest rank of each wave.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshplan.errors import PlanError
from meshplan.ops.attention.schedule import Piece, Schedule, Work, degrees

_WORTH = 0.01
"""What part of a step more ranks for samples must save."""

_CAPS = 16
"""Caps that are tried."""

_TRIES = 3
"""Samples that are tried on more ranks before a placement is taken for good."""


def plan_samples(
    lengths: Sequence[int], ranks: int, max_tokens_per_rank: int, *, balance: str = "zigzag", work: Work | None = None
) -> Schedule:
    """Where each sample of a packed batch goes.

    Arguments:
        lengths: tokens of each sample.
        ranks: of the cp axis.
        max_tokens_per_rank: rows that a rank can hold in one wave, padding included; there are as many waves as that takes.
        balance: of samples on several ranks.
        work: what is to be balanced; default: pairs of positions under a causal mask.

    Raises PlanError: `context-samples` for samples that do not fit on all ranks together, or are empty.
    """
    work = work or Work()
    options = [_options(i, length, ranks, max_tokens_per_rank, balance) for i, length in enumerate(lengths)]
    unfit = [f"{i} ({length} tokens)" for i, length in enumerate(lengths) if not options[i]]
    if unfit:
        raise PlanError(
            f"samples do not fit on {ranks} ranks of {max_tokens_per_rank} tokens: {', '.join(unfit)}",
            code="context-samples",
            legal=f"samples of 1 to {_most(ranks, max_tokens_per_rank, balance)} tokens",
        )
    loads = functools.cache(lambda length, degree: Piece(0, length, degree, balance=balance).loads(work))
    shares = [[max(loads(p.length, p.degree)) for p in ways] for ways in options]
    found = [
        _placed([_under(cap, *both) for both in zip(options, shares, strict=True)], ranks, max_tokens_per_rank, loads)
        for cap in _caps(shares)
    ]
    fastest = min(map(_time, found), default=0.0)
    best = next(placement for placement in found if _time(placement) <= (1 + _WORTH) * fastest)
    while True:
        others = (_placed(pieces, ranks, max_tokens_per_rank, loads) for pieces in _wider(best, loads))
        better = next((other for other in others if _time(other) < (1 - _WORTH) * _time(best)), None)
        if better is None:
            return Schedule(tuple(lengths), ranks, max_tokens_per_rank, len(best.loads), tuple(best.pieces), work)
        best = better


def _caps(shares: Sequence[Sequence[float]]) -> list[float]:
    """Caps from the highest share that a sample may need to leave on a rank down to the lowest that all can keep, evenly spaced
    among those that make a difference."""
    most, least = max((ways[0] for ways in shares), default=0.0), max((ways[-1] for ways in shares), default=0.0)
    steps = sorted({share for ways in shares for share in ways if least <= share <= most}, reverse=True) or [0.0]
    return [steps[i * (len(steps) - 1) // _CAPS] for i in range(_CAPS)] + [steps[-1]] if len(steps) > _CAPS else steps


def _under(cap: float, ways: Sequence[Piece], shares: Sequence[float]) -> Piece:
    """A sample on the fewest ranks with no share above the cap, or else on the most."""
    return next((piece for piece, share in zip(ways, shares, strict=True) if share <= cap), ways[-1])


@dataclass(frozen=True)
class _Placement:
    """Pieces in their places, with the loads and rows of each wave and rank."""

    pieces: list[Piece]
    loads: list[list[float]]
    rows: list[list[int]]
    most: int


def _time(placement: _Placement) -> float:
    return sum(max(wave) for wave in placement.loads)


def _options(sample: int, length: int, ranks: int, most: int, balance: str) -> list[Piece]:
    """A sample on every number of ranks that can hold it, the fewest first."""
    pieces = [Piece(sample, length, degree, balance=balance) for degree in degrees(ranks)] if length > 0 else []
    return [piece for piece in pieces if piece.rows <= most]


def _most(ranks: int, most: int, balance: str) -> int:
    """The longest sample that fits."""
    return max(most, ranks * (most // 2 * 2 if balance == "zigzag" else most) if ranks > 1 else most)


def _placed(pieces: Sequence[Piece], ranks: int, most: int, loads: Callable[[int, int], list[float]]) -> _Placement:
    """Every piece in the best place that is left, in as few waves as that takes."""
    each = {p.sample: loads(p.length, p.degree) for p in pieces}
    order = sorted(pieces, key=lambda p: (-p.degree, -max(each[p.sample]), p.sample))
    waves = max(1, math.ceil(sum(p.rows * p.degree for p in pieces) / (ranks * most)))
    while True:
        now = _Placement([], [[0.0] * ranks for _ in range(waves)], [[0] * ranks for _ in range(waves)], most)
        if all(_place(piece, each[piece.sample], now) for piece in order):
            return now
        waves += 1


def _place(piece: Piece, mine: list[float], now: _Placement) -> bool:
    """Put a piece where it costs least; False if it fits nowhere."""
    best: tuple[tuple[float, float, int], int, int] | None = None
    for wave, (loads, rows) in enumerate(zip(now.loads, now.rows, strict=True)):
        slowest = max(loads)
        for first in range(0, len(loads), piece.degree):
            held = max(rows[first : first + piece.degree]) + piece.rows
            if held > now.most:
                continue
            after = max(a + b for a, b in zip(loads[first : first + piece.degree], mine, strict=True))
            price = (max(0.0, after - slowest), after, held)
            if best is None or price < best[0]:
                best = (price, wave, first)
    if best is None:
        return False
    _, wave, first = best
    for rank, load in enumerate(mine, first):
        now.loads[wave][rank] += load
        now.rows[wave][rank] += piece.rows
    now.pieces.append(replace(piece, wave=wave, block=first // piece.degree))
    return True


def _wider(best: _Placement, loads: Callable[[int, int], list[float]]) -> Iterator[list[Piece]]:
    """The pieces with more ranks for one of those that the slowest rank of a wave holds, the heaviest first."""
    ranks = len(best.loads[0])
    slow = [wave.index(max(wave)) for wave in best.loads]
    held = [p for p in best.pieces if slow[p.wave] in p.ranks]
    for piece in sorted(held, key=lambda p: -max(loads(p.length, p.degree)))[:_TRIES]:
        more = next((d for d in degrees(ranks) if d > piece.degree), 0)
        if more and replace(piece, degree=more).rows <= best.most:
            yield [replace(p, degree=more) if p.sample == piece.sample else p for p in best.pieces]
