"""Grouped-query attention with a sink for each head and, where asked, a sliding window (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshplan.models.rotary import rotate
from meshplan.ops.attention.sinks import sink_attention


class SinkAttention(nn.Module):
    """Causal attention whose softmax has one more score, learned for each head, that belongs to no key: a head may look
    at nothing (gpt-oss model card, section 2; StreamingLLM, Xiao et al. 2023). Projections have biases.

    By `sink_attention`, since `scaled_dot_product_attention` has no sink. Head counts are read off the tensors.

    Arguments:
        dim, n_heads, n_kv_heads, head_dim: width of the residual stream, heads, heads of keys, width of a head.
        window: a token sees itself and the `window - 1` before it; None for all before it.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = head_dim, window
        self.wq = nn.Linear(dim, n_heads * head_dim)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim)
        self.wo = nn.Linear(n_heads * head_dim, dim)
        self.sinks = nn.Parameter(torch.empty(n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sinks that weigh as much as a score of zero; the projections have initialisers of their own."""
        nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        batch, seq, _ = x.shape
        q = rotate(self.wq(x).view(batch, seq, -1, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(batch, seq, -1, self.head_dim), cos, sin)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seen = self._seen(seq, x.device)
        out = sink_attention(q, k, v, self.sinks, seen, scale=self.head_dim**-0.5, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))

    def _seen(self, seq: int, device: torch.device) -> Tensor:
        """Boolean [seq, seq]: which keys (dim 1) each query (dim 0) sees."""
        place = torch.arange(seq, device=device)
        ago = place.unsqueeze(1) - place
        return ago >= 0 if self.window is None else (ago >= 0) & (ago < self.window)
