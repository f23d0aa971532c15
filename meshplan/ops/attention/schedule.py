"""Which ranks hold which rows of which sample of a packed batch, when samples are spread over as many ranks as they need."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan.ops.attention.sequence import Sequence


def degrees(ranks: int) -> list[int]:
    """The sizes of groups that nest in `ranks`, each the one before times a prime: 8 -> 1, 2, 4, 8; 12 -> 1, 2, 4, 12."""
    found = [1]
    while found[-1] < ranks:
        rest = ranks // found[-1]
        found.append(found[-1] * next(p for p in range(2, rest + 1) if rest % p == 0))
    return found


@dataclass(frozen=True)
class Work:
    """What attention and the rest cost: forward FLOPs of a pair of positions that see each other (4 x heads x head size), and of
    a token. A position sees those at most `left` before it (None: all), and those after it unless `causal`."""

    pair: float = 1.0
    token: float = 0.0
    causal: bool = True
    left: int | None = None

    def of(self, start: int, stop: int, length: int) -> float:
        """The work of the queries from `start` to `stop` of a sample; what is past its length is padding and costs nothing."""
        start, stop = min(start, length), min(stop, length)
        pairs = self._before(stop) - self._before(start)
        if not self.causal:
            pairs += (stop - start) * (length - 1) - (stop * (stop - 1) - start * (start - 1)) // 2
        return self.pair * pairs + self.token * (stop - start)

    def _before(self, stop: int) -> int:
        """Pairs of the queries before `stop` with themselves and what comes before them."""
        full = stop if self.left is None else min(stop, self.left + 1)
        return full * (full + 1) // 2 + (stop - full) * (full if self.left is None else self.left + 1)


@dataclass(frozen=True)
class Piece:
    """One sample on `degree` neighbouring ranks, from `degree * block` on, in one wave.

    Attributes:
        length: of the sample; `rows` of each rank together may be more, which is padding at its end.
    """

    sample: int
    length: int
    degree: int
    block: int = 0
    wave: int = 0
    balance: str = "zigzag"

    @functools.cached_property
    def sequence(self) -> Sequence:
        """How the sample, padded, lies on its ranks."""
        unit = self.degree * (2 if self.balance == "zigzag" and self.degree > 1 else 1)
        return Sequence(-(-self.length // unit) * unit, self.degree, self.balance)

    @property
    def rows(self) -> int:
        """Rows on each of its ranks."""
        return self.sequence.local

    @property
    def ranks(self) -> range:
        """The ranks that hold it."""
        return range(self.block * self.degree, (self.block + 1) * self.degree)

    def loads(self, work: Work) -> list[float]:
        """The work of each of its ranks."""
        runs = (self.sequence.runs(rank) for rank in range(self.degree))
        return [sum(work.of(start, stop, self.length) for start, stop in held) for held in runs]

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """The sample with zeros behind it."""
        behind = [0, 0] * (x.dim() - 1 - dim) + [0, self.sequence.size - self.length]
        return F.pad(x, behind) if behind[-1] else x


@dataclass(frozen=True)
class Schedule:
    """A packed batch on `ranks` ranks in `waves` one after another (each a microbatch).

    A rank's rows of a wave are those of its pieces, in the order of `held`: samples on more ranks first.
    """

    lengths: tuple[int, ...]
    ranks: int
    max_tokens_per_rank: int
    waves: int
    pieces: tuple[Piece, ...]
    work: Work = Work()

    def held(self, rank: int, wave: int = 0) -> list[Piece]:
        """The pieces of a rank. Ranks that share one have the same ones before it, so that all meet in the same order."""
        mine = [p for p in self.pieces if p.wave == wave and rank in p.ranks]
        return sorted(mine, key=lambda p: (-p.degree, p.sample))

    def rows(self, rank: int, wave: int = 0) -> int:
        """Rows of a rank, padding included: at most `max_tokens_per_rank`."""
        return sum(p.rows for p in self.held(rank, wave))

    def runs(self, rank: int, wave: int = 0) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """What a rank holds, in order: a sample and the stretches of it; what is past its length is padding."""
        return [(p.sample, p.sequence.runs(rank - p.ranks.start)) for p in self.held(rank, wave)]

    def loads(self, wave: int = 0) -> list[float]:
        """The work of each rank."""
        found = [0.0] * self.ranks
        for piece in self.pieces:
            if piece.wave == wave:
                for rank, load in zip(piece.ranks, piece.loads(self.work), strict=True):
                    found[rank] += load
        return found

    def cut(self, samples: Listing[Tensor], dim: int, rank: int, wave: int = 0) -> Tensor:
        """A rank's rows of whole samples, packed on `dim`."""
        parts = [
            p.sequence.cut(p.padded(samples[p.sample], dim), dim, rank - p.ranks.start) for p in self.held(rank, wave)
        ]
        return torch.cat(parts, dim) if parts else samples[0].narrow(dim, 0, 0)

    def join(self, parts: Listing[Listing[Tensor]], dim: int) -> list[Tensor]:
        """Whole samples out of the ranks' packed rows, `parts[wave][rank]`; the inverse of `cut`."""
        shards: dict[int, list[Tensor]] = {}
        for wave, of_ranks in enumerate(parts):
            for rank, packed in enumerate(of_ranks):
                held = self.held(rank, wave)
                for piece, part in zip(held, packed.split([p.rows for p in held], dim) if held else (), strict=True):
                    shards.setdefault(piece.sample, []).append(part)
        by_sample = {p.sample: p for p in self.pieces}
        whole = (by_sample[s].sequence.join(shards[s], dim) for s in range(len(self.lengths)))
        return [x.narrow(dim, 0, length) for x, length in zip(whole, self.lengths, strict=True)]
