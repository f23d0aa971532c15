"""Rows of ranks that hold unequal numbers of them, gathered: sizes first, then equal pieces with padding."""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan import compat
from meshplan.runtime.comm import AxisGroup


def sizes_of(x: Tensor, group: AxisGroup) -> list[int]:
    """Rows of `x` on every rank: one all_gather of an integer, and the host waits. Shape-only ranks assume equal ones."""
    told = torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)
    came = group.all_gather(told, 0)
    return [x.shape[0]] * group.size if compat.is_fake(came) else came.tolist()


def padded(x: Tensor, size: int, value: float = 0) -> Tensor:
    """`x` with rows of `value` behind it, `size` in all."""
    if x.shape[0] == size:
        return x
    return torch.cat([x, x.new_full((size - x.shape[0], *x.shape[1:]), value)])


def gather_rows(x: Tensor, sizes: list[int], group: AxisGroup) -> Tensor:
    """All ranks' rows, rank after rank, without the padding that they travel with (not differentiable)."""
    most = max(sizes)
    parts = group.all_gather(padded(x, most), 0).split(most) if most else [x] * group.size
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
