"""A plain single-device GPT-2, written like the original: fused qkv, biases, and head counts taken from the config.

The reshapes use global head counts on purpose. This is what real models look like, and code that a local shard of
the heads cannot run unchanged is what the `gpt/*` plans and the `dtensor` regions are tested on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.errors import PlanError

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT-2.

    Attributes:
        n_embd: width of the residual stream; `n_head` divides it.
        n_layer, n_head: blocks, and attention heads in each.
        vocab_size: rows of the tied embedding and head.
        block_size: longest sequence, in tokens: rows of the learned position embedding.
        dropout: probability, on attention weights, on embeddings and on residual contributions.
    """

    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int
    block_size: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise PlanError(
                f"a width of {self.n_embd} cannot be cut into {self.n_head} heads",
                code="bad-model",
                legal="n_head that divides n_embd",
            )


class Attention(nn.Module):
    """Causal multi-head attention from one fused `q|k|v` projection."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.dropout = c.n_head, c.n_embd, c.dropout
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.resid_dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, n_embd]` to `[batch, seq, n_embd]`."""
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two Linears with the tanh form of GELU between them."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, n_embd]` to `[batch, seq, n_embd]`."""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.mlp = MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, n_embd]` to `[batch, seq, n_embd]`."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 language model: logits, or the mean token cross entropy when labels are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.drop = nn.Dropout(c.dropout)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module (GPT-2 report, section 2.3: residual projections are scaled by 1/sqrt(2 n_layer))."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=INIT_STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Attention | MLP):
            nn.init.normal_(module.c_proj.weight, std=INIT_STD / math.sqrt(2 * self.config.n_layer))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits, or the loss.

        Arguments:
            tokens: int64 `[batch, seq]`, with `seq <= block_size`.
            labels: int64 `[batch, seq]`, already aligned with the logits (no shift here); -100 is not counted.

        Returns:
            logits `[batch, seq, vocab]`, or with `labels` the 0-dim mean cross entropy over counted tokens.
        """
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)


def gpt_tiny() -> GPT:
    """A byte-level GPT-2 of 0.1 M parameters: 4 heads of 16, 2 blocks, sequences up to 256 bytes."""
    return GPT(GPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=256, block_size=256))
