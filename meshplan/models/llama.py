"""A plain single-device Llama, the program that the shipped `llama3/*` plans shard; modules named as in torchtitan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.models.rotary import RopeScaling, Rotary, Yarn, rotate

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a Llama.

    Attributes:
        dim: width of the residual stream.
        n_layers: number of blocks.
        n_heads, n_kv_heads: query heads, and the key/value heads they share; `n_kv_heads` divides `n_heads`.
        ffn_dim: width of the SwiGLU feed-forward.
        vocab_size: rows of the embedding and of the head.
        head_dim: width of one head; None means `dim // n_heads`.
        norm_eps, rope_theta: as in the Llama 3 papers.
        rope_scaling: stretched rotary frequencies, or None.
        tied: the head uses the embedding's weight.
        qk_norm: RMSNorm over each head of q and k before the rotary, as in Qwen 3.
        dropout: probability of dropping a residual contribution.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | Yarn | None = None
    tied: bool = False
    qk_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise PlanError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} kv heads evenly",
                code="bad-model",
                legal="n_kv_heads that divides n_heads",
            )
        if (self.head_dim is None and self.dim % self.n_heads) or self.head_width % 2:
            raise PlanError(
                f"heads of width {self.head_dim or self.dim / self.n_heads} cannot be rotated in pairs",
                code="bad-model",
                legal="an even head_dim, or an even dim / n_heads",
            )

    @property
    def head_width(self) -> int:
        """Width of one head, given or derived."""
        return self.head_dim or self.dim // self.n_heads


def refuse_options(c: LlamaConfig, *names: str) -> None:
    """Raises PlanError `bad-model` if an option is set that a model with these sizes has no use for."""
    for name in names:
        if getattr(c, name):
            raise PlanError(f"this model takes no {name}", code="bad-model", legal=f"{name} left out")


class Attention(nn.Module):
    """Causal grouped-query attention. Head counts are read off the tensors (`view(..., -1, head_dim)`), so that the
    same code runs on any share of the heads."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_width
        self.wq = nn.Linear(c.dim, c.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(c.n_heads * self.head_dim, c.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=c.norm_eps) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)` (GLU variants improve transformer, Shazeer 2020)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.feed_forward = FeedForward(c.dim, c.ffn_dim)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Llama(nn.Module):
    """A Llama language model: logits, or the mean token cross entropy when labels are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = c = config
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.rotary = Rotary(c.head_width, c.rope_theta, c.rope_scaling)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tied:
            self.output.weight = self.tok_embeddings.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module: normal weights, smaller where a block adds to the residual stream (GPT-2 report,
        section 2.3), so that its variance does not grow with depth."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layers)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, Attention):
            nn.init.normal_(module.wo.weight, std=residual_std)
        elif isinstance(module, FeedForward):
            nn.init.normal_(module.w2.weight, std=residual_std)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits, or the loss.

        Arguments:
            tokens: int64 `[batch, seq]`.
            labels: int64 `[batch, seq]`, already aligned with the logits (no shift here); -100 is not counted.
            positions: int64 `[seq]` or `[batch, seq]`; None counts from 0.

        Returns:
            logits `[batch, seq, vocab]`, or with `labels` the 0-dim mean cross entropy over counted tokens.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = self.rotary(positions)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def llama_tiny() -> Llama:
    """A byte-level Llama of 0.1 M parameters, trainable on a laptop in seconds; 8 query heads share 4 kv heads."""
    return Llama(LlamaConfig(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=176, vocab_size=256))


def llama3_8b() -> Llama:
    """Llama 3 8B (Meta Llama 3 model card). Build it under `torch.device("meta")` or `mp.meta` to only look at it."""
    return Llama(LlamaConfig(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, vocab_size=128256))


def llama31_405b() -> Llama:
    """Llama 3.1 405B (The Llama 3 herd of models, table 3). Meta only, unless there are terabytes to spare."""
    return Llama(
        LlamaConfig(
            dim=16384,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            ffn_dim=53248,
            vocab_size=128256,
            rope_scaling=RopeScaling(),
        )
    )
