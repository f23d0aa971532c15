"""How evenly a router spreads its tokens: choices per expert and per rank, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.spec import divisors

WIDTH = 30
"""Characters of the longest bar."""


@dataclass(frozen=True)
class Load:
    """Choices that each expert got, in the order of experts, of which each of `ranks` ranks holds as many."""

    experts: tuple[int, ...]
    ranks: int = 1

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Choices that the experts of each rank got: rows that it computes."""
        local = len(self.experts) // self.ranks
        return tuple(sum(self.experts[r * local : (r + 1) * local]) for r in range(self.ranks))

    @property
    def imbalance(self) -> float:
        """The busiest rank over the mean of all: how much longer the experts of a step take than they need (1 is even)."""
        return _over_mean(self.by_rank)

    @property
    def expert_imbalance(self) -> float:
        """The busiest expert over the mean of all."""
        return _over_mean(self.experts)

    @property
    def idle(self) -> tuple[int, ...]:
        """Experts that got nothing."""
        return tuple(e for e, count in enumerate(self.experts) if not count)

    def __str__(self) -> str:
        total, local = sum(self.experts), len(self.experts) // self.ranks
        lines = [
            f"{total} choices, {len(self.experts)} experts on {self.ranks} rank{'s' * (self.ranks != 1)}   counted",
            f"busiest rank {self.imbalance:.2f} x mean, busiest expert {self.expert_imbalance:.2f} x mean, "
            f"{len(self.idle)} idle",
            f"{'rank':>4} {'expert':>7} {'choices':>9} {'share':>6}",
        ]
        for rank, count in enumerate(self.by_rank):
            lines.append(f"{rank:>4} {'all':>7} {count:>9} {_share(count, total)}")
            for e in range(rank * local, (rank + 1) * local):
                bar = "#" * round(WIDTH * self.experts[e] / max(1, *self.experts))
                lines.append(f"{'':>4} {e:>7} {self.experts[e]:>9} {_share(self.experts[e], total)} {bar}".rstrip())
        return "\n".join(lines)


def load_table(counts: Tensor | Sequence[int], ranks: int = 1) -> Load:
    """The load of a step; `print` shows it as a table.

    Arguments:
        counts: [E] choices per expert over the whole batch (`count_choices`), or [n, E] by the rank whose tokens they are.
        ranks: that share one copy of the experts.

    Raises:
        PlanError: `experts-split` if they do not divide the experts.
    """
    if isinstance(counts, Tensor):
        counts = (counts.sum(0) if counts.dim() == 2 else counts).tolist()
    if len(counts) % ranks:
        raise PlanError(
            f"{len(counts)} experts cannot be split over {ranks} ranks",
            code="experts-split",
            legal=list(map(str, divisors(len(counts)))),
        )
    return Load(tuple(counts), ranks)


def _over_mean(counts: tuple[int, ...]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _share(count: int, total: int) -> str:
    return f"{count / total if total else 0.0:>6.1%}"
