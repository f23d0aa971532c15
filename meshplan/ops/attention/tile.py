"""What the positions of a block see of each other: which parts of it are computed, and which need a mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 1024
"""Queries that are computed at once: what bounds the memory of the scores, and how finely invisible keys are left out."""


@dataclass(frozen=True)
class Span:
    """What a block sees by position: query i stands at pq = q_start + i, key j at pk = k_start + j of the whole sequence, and
    they see each other where pq - left <= pk <= pq + right; None is no limit. (None, None) is full attention, right=0
    causal, left=w-1 and right=0 a sliding window of w."""

    q_start: int
    k_start: int
    left: int | None = None
    right: int | None = None

    def keys(self, lq: int, lk: int) -> tuple[int, int]:
        """First and one past the last of `lk` keys that any of `lq` queries sees; equal where there are none."""
        ahead = self.q_start - self.k_start
        first = 0 if self.left is None else min(max(0, ahead - self.left), lk)
        stop = lk if self.right is None else max(0, min(lk, ahead + lq + self.right))
        return (first, stop) if lq and first < stop else (0, 0)

    def sees_all(self, lq: int, lk: int) -> bool:
        """Whether each of `lq` queries sees each of `lk` keys."""
        ahead = self.q_start - self.k_start
        on_left = self.left is None or ahead + lq - 1 - self.left <= 0
        return on_left and (self.right is None or lk - 1 <= ahead + self.right)


class Tile(NamedTuple):
    """A part of a block: queries q0 to q1 and keys k0 to k1, with what is known of them."""

    q0: int
    q1: int
    k0: int
    k1: int
    span: Span
    docs: tuple[Tensor, Tensor] | None
    bias: Tensor | None

    def rows(self, x: Tensor) -> Tensor:
        return x.narrow(2, self.q0, self.q1 - self.q0)

    def keys(self, x: Tensor) -> Tensor:
        return x.narrow(2, self.k0, self.k1 - self.k0)

    def corner(self, x: Tensor) -> Tensor:
        """The part of a tensor that broadcasts to [B, H, Lq, Lk]."""
        if x.dim() > 1 and x.shape[-2] > 1:
            x = x.narrow(-2, self.q0, self.q1 - self.q0)
        return x.narrow(-1, self.k0, self.k1 - self.k0) if x.shape[-1] > 1 else x

    def visible(self, device: torch.device) -> Tensor | None:
        """What position and document let see, broadcast to [B, H, rows, keys]; None if that is everything."""
        rows, keys, span = self.q1 - self.q0, self.k1 - self.k0, self.span
        visible = None
        if not span.sees_all(rows, keys):
            at = torch.arange(span.q_start, span.q_start + rows, device=device).unsqueeze(1)
            to = torch.arange(span.k_start, span.k_start + keys, device=device)
            if span.left is not None:
                visible = to >= at - span.left
            if span.right is not None:
                ahead = to <= at + span.right
                visible = ahead if visible is None else visible & ahead
        if self.docs is not None:
            mine, theirs = (
                self.docs[0][:, None, self.q0 : self.q1, None],
                self.docs[1][:, None, None, self.k0 : self.k1],
            )
            same = (mine == theirs) & (mine >= 0)
            visible = same if visible is None else visible & same
        return visible


def tiles(
    q: Tensor, k: Tensor, span: Span, q_docs: Tensor | None, k_docs: Tensor | None, bias: Tensor | None
) -> Iterator[Tile]:
    """The parts of a block in which something may be seen."""
    lq, lk = q.shape[2], k.shape[2]
    docs = None if q_docs is None or k_docs is None else (q_docs, k_docs)
    for q0 in range(0, lq, _ROWS):
        q1 = min(lq, q0 + _ROWS)
        k0, k1 = Span(span.q_start + q0, span.k_start, span.left, span.right).keys(q1 - q0, lk)
        if k0 < k1:
            yield Tile(q0, q1, k0, k1, Span(span.q_start + q0, span.k_start + k0, span.left, span.right), docs, bias)
