"""Many ranks in few characters, for messages and tables."""

from __future__ import annotations

from collections.abc import Iterable


def rank_runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """The (first, last) of each run of consecutive ranks, ascending."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def ranks_text(ranks: Iterable[int], limit: int = 8) -> str:
    """Ranks as runs, `0-2, 5, 7-9`, of which at most `limit` are written out: for messages."""
    runs = rank_runs(ranks)
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:limit]]
    left = sum(last - first + 1 for first, last in runs[limit:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


def ranks_short(ranks: Iterable[int]) -> str:
    """Ascending ranks without a space, so that a table cell breaks between groups only: `0-7`, `0,2,5`, or
    `0,8,..,120` for a long row, whose runs or equal steps its beginning shows."""
    given = list(ranks)
    runs = rank_runs(given)
    if len(runs) == 1 and len(given) > 2:
        return f"{given[0]}-{given[-1]}"
    if len(given) <= 8:
        return ",".join(map(str, given))
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ",".join(parts if len(parts) <= 4 else [*parts[:2], "..", parts[-1]])
