"""A table of what a schedule of samples evens out, beside two plainer ways and the bound that none can pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from meshplan.ops.attention.schedule import Piece, Schedule, degrees


@dataclass(frozen=True)
class Balance:
    """How evenly a way spreads a batch (modelled): the slowest rank of each wave, summed, over the mean.

    Attributes:
        work, tokens: 1 is even.
        sent: rows of keys and values that the busiest rank sends forward.
        bound: what `work` cannot be below: the mean itself, and the largest share that a sample leaves on one rank.
    """

    work: float
    tokens: float
    sent: int
    bound: float


def ways(schedule: Schedule) -> dict[str, Schedule]:
    """The same batch with every sample over all ranks, contiguous and zigzag; with samples placed by tokens alone, contiguous;
    and as scheduled."""
    return {
        "all ranks": _over_all(schedule, "contiguous"),
        "all, zigzag": _over_all(schedule, "zigzag"),
        "by tokens": _by_tokens(schedule),
        "dynamic": schedule,
    }


def balance(schedule: Schedule) -> Balance:
    """How evenly a schedule spreads its batch."""
    work, waves, ranks = schedule.work, range(schedule.waves), range(schedule.ranks)
    mean = sum(work.of(0, length, length) for length in schedule.lengths) / schedule.ranks
    rows = [[schedule.rows(rank, wave) for rank in ranks] for wave in waves]
    sent = [sum((p.degree - 1) * p.rows for p in schedule.pieces if rank in p.ranks) for rank in ranks]
    largest = max(max(p.loads(work)) for p in schedule.pieces)
    return Balance(
        sum(max(schedule.loads(wave)) for wave in waves) / mean,
        sum(max(wave) for wave in rows) / (sum(schedule.lengths) / schedule.ranks),
        max(sent),
        max(1.0, largest / mean),
    )


def report(schedule: Schedule) -> str:
    """The table: each way to spread the batch in a line, with how many samples lie on how many ranks."""
    lines = [
        f"{len(schedule.lengths)} samples, {sum(schedule.lengths)} tokens, {schedule.ranks} ranks of "
        f"{schedule.max_tokens_per_rank}, {schedule.waves} wave{'s' * (schedule.waves > 1)}   modelled",
        f"{'':12}{'work':>8}{'bound':>8}{'tokens':>8}{'KV rows sent':>14}   samples x ranks",
    ]
    for name, made in ways(schedule).items():
        found = balance(made)
        spread = ", ".join(f"{n} x {degree}" for degree, n in sorted(Counter(p.degree for p in made.pieces).items()))
        lines.append(f"{name:12}{found.work:8.3f}{found.bound:8.3f}{found.tokens:8.3f}{found.sent:14}   {spread}")
    return "\n".join(
        [*lines, "work and tokens: the fullest rank over the mean, wave by wave; bound: what work cannot be below"]
    )


def _over_all(schedule: Schedule, order: str) -> Schedule:
    pieces = [Piece(i, length, schedule.ranks, balance=order) for i, length in enumerate(schedule.lengths)]
    return replace(schedule, pieces=tuple(pieces), waves=1)


def _by_tokens(schedule: Schedule) -> Schedule:
    """Each sample on the fewest ranks that hold it, longest first, where there are fewest tokens."""
    ranks, most = schedule.ranks, schedule.max_tokens_per_rank
    rows: list[list[int]] = [[0] * ranks for _ in range(schedule.waves)]
    pieces = []
    for i, length in sorted(enumerate(schedule.lengths), key=lambda pair: -pair[1]):
        piece = next(p for d in degrees(ranks) if (p := Piece(i, length, d, balance="contiguous")).rows <= most)
        places = [
            (max(held[first : first + piece.degree]), wave, first)
            for wave, held in enumerate(rows)
            for first in range(0, ranks, piece.degree)
        ]
        tokens, wave, first = min(places)
        if tokens + piece.rows > most:
            rows.append([0] * ranks)
            wave, first = len(rows) - 1, 0
        for rank in range(first, first + piece.degree):
            rows[wave][rank] += piece.rows
        pieces.append(replace(piece, wave=wave, block=first // piece.degree))
    return replace(schedule, pieces=tuple(pieces), waves=len(rows))
