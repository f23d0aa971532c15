"""Packed documents given by offsets (`cu_seqlens`): where each begins in the whole sequence, and where the last ends."""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError


def fault_of(offsets: Tensor, size: int) -> str | None:
    """What is wrong with `offsets` [documents + 1] of a sequence of `size`, or None. Equal neighbours are a document of no
    positions, which is how a batch with fewer documents keeps its shape. Reads the values, which a GPU is waited for."""
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64) or not offsets.numel():
        return f"are {str(offsets.dtype).removeprefix('torch.')}{list(offsets.shape)}"
    values = offsets.tolist()
    if values[0] != 0:
        return f"begin at {values[0]}"
    down = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)
    if down is not None:
        return f"go from {values[down - 1]} down to {values[down]}"
    return f"end at {values[-1]}" if values[-1] != size else None


def bad_offsets(what: str, fault: str, size: int) -> PlanError:
    """PlanError `bad-offsets`."""
    return PlanError(
        f"the offsets {what} of a sequence of {size} {fault}", code="bad-offsets",
        legal=f"int32 or int64 [documents + 1] that begin at 0, do not descend and end at {size}",
    )  # fmt: skip


def documents_of(offsets: Tensor, size: int) -> Tensor:
    """int64 [size]: the number of the document that each position is of.

    Raises PlanError `bad-offsets`.
    """
    if not (offsets.is_meta or compat.is_fake(offsets)) and (fault := fault_of(offsets, size)) is not None:
        raise bad_offsets("cu_seqlens", fault, size)
    at = torch.arange(size, device=offsets.device)
    return torch.searchsorted(offsets[1:].to(torch.int64).contiguous(), at, right=True)
