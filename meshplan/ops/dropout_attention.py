"""Scaled dot-product attention with dropout on the probabilities, masked by their global batch, head and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.streams import Key
from meshplan.ops.dropout import Runs, dropout
from meshplan.ops.precision import wide


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    stream: Key,
    global_shape: Sequence[int],
    offsets: Sequence[int | Runs],
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with dropout that no split of batch and heads changes.

    Without dropout it is torch's own (fused) operator. With dropout the probabilities are made explicitly, as in
    torch's math backend: O(L S) memory per head, the price of a mask that any sharding can reproduce. Softmax and
    products of half-precision inputs are in float32 there. Rows that `attn_mask` masks entirely give zero, as in torch.

    Arguments:
        query: `[..., H, L, E]`, this rank's batch rows and heads.
        key, value: `[..., H, S, E]` and `[..., H, S, Ev]`; with `enable_gqa` their heads divide H.
        attn_mask: boolean (True takes part) or floating (added), broadcast to `[..., H, L, S]`.
        dropout_p: applied as given; pass 0 in evaluation, as with torch.
        is_causal: query i sees keys 0 to i, counted in this call's own L and S.
        stream: key of the dropout stream.
        global_shape: shape `[..., H, L, S]` of the probabilities on one device.
        offsets: as in `dropout`: per dim of the probabilities, where this rank's part begins, or its runs.

    Returns:
        `[..., H, L, Ev]` in the dtype of `query`.

    Raises:
        PlanError: `attention-mask` if both `attn_mask` and `is_causal` are given; `attention-heads` if key heads do not
            divide query heads; what `dropout` raises.
    """
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_causal and attn_mask is not None:
        raise PlanError(
            "attention got both attn_mask and is_causal", code="attention-mask", legal="one of them; torch refuses both"
        )
    out_dtype = query.dtype
    query, key, value = (x.to(wide(out_dtype)) for x in (query, key, value))
    if enable_gqa:
        key, value = _spread_heads(key, query), _spread_heads(value, query)
    # The root of the scale on both factors, as torch does: products stay in range.
    root = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        probabilities = scores.softmax(-1)
    else:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask.to(scores.dtype)
        # A row of -inf has no softmax. Filled before and after, so that its gradient is zero and not nan.
        blind = (scores == float("-inf")).all(-1, keepdim=True)
        probabilities = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    kept = dropout(probabilities, dropout_p, True, key=stream, global_shape=global_shape, offsets=offsets)
    return (kept @ value).to(out_dtype)


def _spread_heads(x: Tensor, query: Tensor) -> Tensor:
    heads, own = query.shape[-3], x.shape[-3]
    if heads % own:
        raise PlanError(
            f"attention has {heads} query heads and {own} key or value heads",
            code="attention-heads",
            legal="a number of key and value heads that divides the query heads",
        )
    return x.repeat_interleave(heads // own, -3)
