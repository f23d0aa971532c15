"""Host memory that a load fills before anything live is touched, made only where shape and dtype agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.runtime.dcp import Piece
from meshplan.runtime.extents import Box, local_part

Saved = tuple[tuple[int, ...], torch.dtype]  # shape and dtype in the checkpoint


def stage(key: str, tensor: Tensor, saved: Saved, boxes: Sequence[Box]) -> Piece:
    """Staging for this rank's part of the live `tensor`; PlanError `shape-mismatch` or `dtype-mismatch`."""
    shape, dtype = saved
    if tuple(tensor.shape) != shape:
        raise PlanError(
            f"{key} is {list(shape)} in the checkpoint, {list(tensor.shape)} in the model", code="shape-mismatch"
        )
    if tensor.dtype != dtype:
        raise PlanError(
            f"{key} is {dtype} in the checkpoint, {tensor.dtype} in the model",
            code="dtype-mismatch",
            legal="the dtype that was saved; convert the model after loading",
        )
    return Piece(torch.empty(local_part(tensor).shape, dtype=dtype), shape, tuple(boxes))


def beside(saved: Saved) -> Piece:
    """Staging for a whole saved tensor that no live one answers to yet."""
    shape, dtype = saved
    zero = (0,) * len(shape)
    return Piece(torch.empty(shape, dtype=dtype), shape, (Box(zero, shape, zero),))


def listed(names: Sequence[str], most: int = 5) -> str:
    """`names` joined by commas, the first few of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
