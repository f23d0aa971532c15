"""Multi-head latent attention (DeepSeek-V2, section 2.1): queries, and keys with values, through low-rank latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.models.rotary import rotate_adjacent


class LatentAttention(nn.Module):
    """Causal attention whose heads are widened from two latents; positions sit in a part of its own.

        query  [nope | rope] of every head, from a latent of `q_rank`
        key    [nope | rope]: nope of every head from a latent of `kv_rank`, rope one for all heads, not from a latent
        value  of every head from the keys' latent

    Head counts are read off the tensors, so that the same code runs on any share of the heads.

    Arguments:
        dim, n_heads: width of the residual stream, heads.
        q_rank, kv_rank: widths of the latents.
        nope_dim, rope_dim, v_dim: width of a head's part without positions, with them, and of its value.
        eps: of the norms of the latents.
        score_gain: what scores are multiplied by beside 1 / sqrt(nope_dim + rope_dim), see `Yarn.score_gain`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        q_rank: int,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        eps: float,
        score_gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.kv_rank, self.nope_dim, self.rope_dim, self.v_dim = kv_rank, nope_dim, rope_dim, v_dim
        self.scale = score_gain * (nope_dim + rope_dim) ** -0.5
        self.wq_a = nn.Linear(dim, q_rank, bias=False)
        self.q_norm = nn.RMSNorm(q_rank, eps=eps)
        self.wq_b = nn.Linear(q_rank, n_heads * (nope_dim + rope_dim), bias=False)
        self.wkv_a = nn.Linear(dim, kv_rank + rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank, eps=eps)
        self.wkv_b = nn.Linear(kv_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        batch, seq, _ = x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(batch, seq, -1, self.nope_dim + self.rope_dim)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.wkv_a(x).split([self.kv_rank, self.rope_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent)).view(batch, seq, -1, self.nope_dim + self.v_dim)
        k_nope, v = kv.split([self.nope_dim, self.v_dim], dim=-1)
        q_rope, k_rope = rotate_adjacent(q_rope, cos, sin), rotate_adjacent(k_rope.unsqueeze(2), cos, sin)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
