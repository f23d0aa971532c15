"""Keys and values as one flat message, so that a collective carries both."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(k: Tensor, v: Tensor) -> Tensor:
    """`k` and `v` one behind the other, flat and contiguous."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpack(message: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """`k` and `v` out of a message: contiguous views."""
    k, v = message.split([k_shape.numel(), v_shape.numel()])
    return k.view(k_shape), v.view(v_shape)
