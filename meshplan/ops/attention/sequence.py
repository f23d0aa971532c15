"""Where the rows of each rank's shard stand in the whole sequence: one run a rank, or an early and a late one."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.errors import PlanError

BALANCES = ("zigzag", "contiguous")

Run = tuple[int, int]
"""First position of a stretch of the whole sequence, and the one after its last."""


@dataclass(frozen=True)
class Sequence:
    """A sequence of `size` cut over `ranks` in equal shards. Of 16 positions on 2 ranks,

        contiguous   0-7            | 8-15
        zigzag       0-3, 12-15     | 4-7, 8-11

    zigzag gives rank r the chunks r and 2n - 1 - r of 2n, in that order: under a causal mask every rank then has as many
    pairs of positions to compute as any other.

    Raises PlanError `context-length` where the ranks do not divide the sequence, `bad-value` for an unknown balance.
    """

    size: int
    ranks: int
    balance: str = "contiguous"

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise PlanError(f"a sequence cannot be balanced {self.balance!r}", code="bad-value", legal=list(BALANCES))
        if self.size % self.unit:
            near = self.size // self.unit * self.unit
            raise PlanError(
                f"a sequence of {self.size} cannot be cut {self.balance} over {self.ranks} ranks",
                code="context-length",
                legal=f"a multiple of {self.unit}, such as {' or '.join(str(s) for s in (near, near + self.unit) if s)}",
            )

    @property
    def unit(self) -> int:
        """What the size is a multiple of."""
        if self.ranks == 1:
            return 1
        return self.ranks * (2 if self.balance == "zigzag" else 1)

    def causal_pairs(self, rank: int) -> int:
        """Pairs of positions that `rank` computes under a causal mask: position p sees p + 1 of them. Over contiguous ranks they
        grow as 1, 3, 5, ..., over zigzag ones they are equal."""
        return sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in self.runs(rank))

    @property
    def local(self) -> int:
        """Positions that each rank holds."""
        return self.size // self.ranks

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The stretches that `rank` holds, in the order in which it holds them."""
        if self.balance == "contiguous" or self.ranks == 1:
            return ((rank * self.local, (rank + 1) * self.local),)
        chunk, late = self.local // 2, 2 * self.ranks - 1 - rank
        if late == rank + 1:  # the middle rank's two chunks touch
            return ((rank * chunk, (late + 1) * chunk),)
        return ((rank * chunk, (rank + 1) * chunk), (late * chunk, (late + 1) * chunk))

    def all_runs(self, first: int = 0, ranks: int | None = None) -> tuple[Run, ...]:
        """The stretches of `ranks` neighbouring ranks from `first` on (default: all), rank after rank."""
        last = self.ranks if ranks is None else first + ranks
        return tuple(run for rank in range(first, last) for run in self.runs(rank))

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64 `[size / ranks]`: the place in the whole of each row that `rank` holds."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.runs(rank)])

    def cut(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The shard of `rank` of a whole `x`, in its local order; no communication."""
        pieces = [x.narrow(dim, start, stop - start) for start, stop in self.runs(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def join(self, parts: Listing[Tensor], dim: int) -> Tensor:
        """The whole out of all ranks' shards, in rank order; the inverse of `cut`."""
        pieces = [piece for rank, part in enumerate(parts) for piece in split(part, dim, self.runs(rank))]
        return _cat(pieces, self.all_runs(), dim)


def split(x: Tensor, dim: int, runs: Listing[Run]) -> list[Tensor]:
    """`x`, which holds `runs` one after another on `dim`, cut into them: views."""
    return list(x.split([stop - start for start, stop in runs], dim))


def in_order(x: Tensor, dim: int, runs: Listing[Run]) -> Tensor:
    """`x`, which holds `runs` one after another on `dim`, with them sorted by position."""
    if list(runs) == sorted(runs):
        return x
    return _cat(split(x, dim, runs), runs, dim)


def out_of_order(x: Tensor, dim: int, runs: Listing[Run]) -> Tensor:
    """The inverse of `in_order`: sorted rows put in the order of `runs`."""
    if list(runs) == sorted(runs):
        return x
    pieces = dict(zip(sorted(runs), split(x, dim, sorted(runs)), strict=True))
    return torch.cat([pieces[run] for run in runs], dim)


def _cat(pieces: list[Tensor], runs: Listing[Run], dim: int) -> Tensor:
    ordered = [piece for _, piece in sorted(zip(runs, pieces, strict=True), key=lambda pair: pair[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim)
