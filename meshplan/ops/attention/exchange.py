"""Heads exchanged for rows: between a rank's rows of all heads and a rank's heads of all rows.

    before   [B, H, S/n, D]   rank 0: heads 0-3 of rows 0-7      rank 1: heads 0-3 of rows 8-15
    after    [B, H/n, S, D]   rank 0: heads 0-1 of rows 0-15     rank 1: heads 2-3 of rows 0-15

Rows arrive rank after rank and are then sorted by their position, so that what computes on them needs to know nothing.
(Jacobs et al., "DeepSpeed Ulysses", 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshplan.ops.attention.mask import Mask
from meshplan.ops.attention.sequence import Run, in_order, out_of_order
from meshplan.runtime.comm import AxisGroup


@dataclass(frozen=True)
class Exchange:
    """Among the ranks of `group`, whose rows lie at `runs`, rank after rank."""

    group: AxisGroup
    runs: Listing[Run]

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, H, L, D] -> [B, H/n, n L, D], rows in true order: one all_to_all."""
        return in_order(self.group.all_to_all(x, 1, 2), 2, self.runs)

    def to_rows(self, x: Tensor) -> Tensor:
        """[B, H/n, n L, D] -> [B, H, L, D]: the inverse, and its own mate in backward."""
        return self.group.all_to_all(out_of_order(x, 2, self.runs), 2, 1)

    def copies(self, heads: int) -> int:
        """Ranks to which each of `heads` key heads goes: 1 where there are enough of them."""
        return max(1, self.group.size // heads)

    def keys_to_heads(self, x: Tensor) -> Tensor:
        """`to_heads` of keys or values. Key heads fewer than the ranks are repeated first, n heads in all, so that a rank gets
        the one that its query heads use: n/Hkv times the bytes."""
        copies = self.copies(x.shape[1])
        return self.to_heads(x if copies == 1 else x.repeat_interleave(copies, 1))

    def keys_to_rows(self, dx: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """The mate of `keys_to_heads`, for gradients in wide precision; repeated heads come back in it and are summed up."""
        copies = self.copies(heads)
        if copies == 1:
            return self.to_rows(dx.to(dtype))
        return self.to_rows(dx).unflatten(1, (heads, copies)).sum(2).to(dtype)

    def mask(self, mask: Mask, heads: int, device: torch.device) -> Mask:
        """`mask` as it is for this rank's share of `heads` query heads and all rows.

        A bias costs one all_to_all of its rows if it has heads, one all_gather if it has none (rows that ranks share, none); what
        is made where it is wanted costs nothing.
        """
        mine = heads // self.group.size
        dropped = None if mask.dropped is None else mask.dropped.of_heads(self.group.rank * mine, mine)
        sink = None if mask.sink is None else self.group.shard(mask.sink, 0)
        if mask.sees is not None:
            first = self.group.rank * mine
            mask = mask.shown((first, first + mine), sorted(self.runs), device)
        elif mask.bias is not None and self.group.size > 1:
            mask = replace(mask, bias=self._bias(mask.bias))
        return replace(mask, dropped=dropped, sink=sink)

    def bias_gradient(self, dbias: Tensor, like: Tensor) -> Tensor:
        """The gradient of a bias `like` a rank's, given that of what `mask` made of it: summed over the heads where it has none,
        and this rank's summand where ranks share its rows."""
        n = self.group.size
        if n == 1:
            return dbias.to(like.dtype)
        if like.shape[2] == 1:
            return (dbias if like.shape[1] == 1 else self._padded(dbias, 1, like.shape[1])).to(like.dtype)
        if like.shape[1] > 1:
            return self.to_rows(dbias.to(like.dtype))
        return self.group.reduce_scatter(out_of_order(dbias, 2, self.runs), 2).to(like.dtype)

    def sink_gradient(self, dsink: Tensor, heads: int) -> Tensor:
        """The gradient of all sinks: those of this rank's heads, zeros for the others."""
        return self._padded(dsink, 0, heads)

    def _bias(self, bias: Tensor) -> Tensor:
        if bias.shape[2] == 1:
            return bias if bias.shape[1] == 1 else self.group.shard(bias, 1)
        sent = bias.to(torch.uint8) if bias.dtype == torch.bool else bias
        if bias.shape[1] > 1:
            came = self.to_heads(sent)
        else:
            came = in_order(self.group.all_gather(sent, 2), 2, self.runs)
        return came.to(bias.dtype)

    def _padded(self, x: Tensor, dim: int, size: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = size
        full = x.new_zeros(shape)
        self.group.shard(full, dim).copy_(x)
        return full
