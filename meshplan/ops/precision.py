"""The dtype an operator computes in: what torch's own operators do with half precision, and what autocast does."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are accumulated: float32 for half precision, else its own."""
    return torch.promote_types(dtype, torch.float32)


def autocast_to_float32(x: Tensor, *, on_cpu: bool) -> Tensor:
    """`x` as autocast hands it to an operator on its float32 list: half precision becomes float32, differentiably.

    Arguments:
        on_cpu: whether the operator is on the CPU's list too (losses are, norms are not: torch 2.11 to 2.13).
    """
    kind = x.device.type
    if x.dtype not in HALF or (kind == "cpu" and not on_cpu) or not torch.amp.is_autocast_available(kind):
        return x
    return x.float() if torch.is_autocast_enabled(kind) else x
