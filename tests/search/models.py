"""Small modules that a planner has to find its way through, each with odd sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Fused(nn.Module):
    """Attention with one q|k|v projection split into unequal parts (grouped queries), and a gate|up MLP cut by `chunk`."""

    def __init__(self, dim: int = 24, heads: int = 4, kv: int = 2, hidden: int = 28) -> None:
        super().__init__()
        self.heads, self.kv, self.d = heads, kv, dim // heads
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv) * self.d)
        self.out = nn.Linear(dim, dim)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).split([self.heads * self.d, self.kv * self.d, self.kv * self.d], dim=-1)
        q, k, v = (t.view(b, s, -1, self.d).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Parallel(nn.Module):
    """Attention and MLP beside each other on one norm (GPT-J, Cohere), attention written out with a slope a head (ALiBi)."""

    def __init__(self, dim: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 36), nn.Linear(36, dim)
        self.register_buffer("slopes", torch.tensor([2.0 ** -(i + 1) for i in range(heads)]))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm(x)
        q, k, v = (m(h).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        at = torch.arange(s)
        bias = self.slopes.to(x.dtype).view(1, -1, 1, 1) * (at[None, :] - at[:, None])
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
        scores = scores.masked_fill(at[None, :] > at[:, None], float("-inf"))
        a = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
        return x + self.o(a) + self.down(F.gelu(self.up(h)))


class Mixer(nn.Module):
    """A gated recurrent mixer: a depthwise causal convolution, and a scan with a decay of each channel's own."""

    def __init__(self, dim: int = 24, inner: int = 36) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.RMSNorm(dim)
        self.into = nn.Linear(dim, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.decay = nn.Parameter(torch.zeros(inner))
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        u, gate = self.into(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :s]).transpose(1, 2)
        state, out = torch.zeros_like(u[:, 0]), []
        for t in range(s):
            state = state * torch.sigmoid(self.decay) + u[:, t]
            out.append(state)
        return x + self.out(torch.stack(out, dim=1) * F.silu(gate))


class Stack(nn.Module):
    """Token and learned position embeddings, three blocks, a final norm, a head (tied or not) and a loss."""

    def __init__(self, block: type[nn.Module], vocab: int = 46, dim: int = 24, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


BLOCKS = {"fused": Fused, "parallel": Parallel, "mixer": Mixer}


def stack(block: str, tied: bool = False) -> Stack:
    return Stack(BLOCKS[block], tied=tied)


def batch(rows: int = 4, length: int = 10, vocab: int = 46) -> dict[str, Tensor]:
    """Ids, and labels of which rows leave out unequal numbers."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocab, (rows, length), generator=g)
    labels = ids.roll(-1, 1)
    for row in range(rows):
        labels[row, length - row :] = -100
    return {"ids": ids, "labels": labels}
