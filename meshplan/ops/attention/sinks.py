"""Attention with sinks as an operator that a compiler can see: one more score for each head, which belongs to no key.

`scaled_dot_product_attention` has no such score. Written out, attention gathers its keys over a split sequence; as this one
call it runs over cp by any method of the plan's `context` section.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function

from meshplan import compat


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose softmax has one more score, `sinks` of the head, whose share is given to nothing: a head may look at
    nothing (StreamingLLM, Xiao et al. 2023; gpt-oss model card, OpenAI 2025, section 2).

    Arguments:
        query: [B, H, Q, D]; key: [B, Hkv, K, D]; value: [B, Hkv, K, Dv].
        sinks: [H].
        attn_mask, is_causal, scale, enable_gqa: as of `scaled_dot_product_attention`.

    Returns:
        [B, H, Q, Dv] in the dtype of `value`; rows that see no key are zero.
    """
    given: tuple[Any, ...] = (query, key, value, sinks, attn_mask, is_causal, scale, enable_gqa)
    tensors = tuple(t for t in given if isinstance(t, Tensor))
    if compat.current_function_mode() is not None and not any(isinstance(t, DTensor) for t in tensors):
        return handle_torch_function(sink_attention, tensors, *given)  # type: ignore[no-any-return]
    shared = query.shape[1] // key.shape[1] if enable_gqa else 1
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(-1, -2) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if boolean else scores + attn_mask
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:2], scores.shape[2], 1)
    shares = torch.cat([scores, column.to(scores.dtype)], dim=-1).softmax(-1)[..., :-1]
    return shares.to(value.dtype) @ value
