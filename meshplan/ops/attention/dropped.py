"""Dropout of attention's probabilities by where they stand in the whole: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from meshplan.mesh.streams import Key
from meshplan.ops.dropout import Runs, block_mask


@dataclass(frozen=True)
class Dropped:
    """Dropout with probability `p` of the probabilities [B, H, S, S] of one device.

    Attributes:
        stream: key of the dropout stream.
        shape: that shape on one device, over the whole batch and all heads.
        batch, heads: where this rank's begin in it, or their runs.
    """

    p: float
    stream: Key
    shape: Sequence[int]
    batch: int | Runs = 0
    heads: int | Runs = 0

    def factor(self, q_start: int, k_start: int, like: Tensor) -> Tensor:
        """What to multiply a block [B, H, Lq, Lk] of probabilities by whose corner is at these positions: 0 or 1 / (1 - p)."""
        where = (self.batch, self.heads, q_start, k_start)
        keep = block_mask(self.stream, self.p, self.shape, where, like.shape, like.device)
        return keep.to(like.dtype).mul_(0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p))

    def of_heads(self, start: int, count: int) -> Dropped:
        """The same for `count` of these heads, from `start` on."""
        if isinstance(self.heads, int):
            return replace(self, heads=self.heads + start)
        kept, at = [], 0
        for first, length in self.heads:
            low, high = max(start, at), min(start + count, at + length)
            if low < high:
                kept.append((first + low - at, high - low))
            at += length
        return replace(self, heads=tuple(kept))
