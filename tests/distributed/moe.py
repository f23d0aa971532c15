"""A small mixture of experts as users write it: a loop over packed experts, a router in the block, a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, EXPERTS = 37, 12, 8


class Experts(nn.Module):
    """`experts` MLPs of inner width `inner`, packed."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.number = experts
        self.up = nn.Parameter(torch.randn(experts, width, 2 * inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)
        self.bias = nn.Parameter(torch.randn(experts, width) / 3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.number):
            t, j = torch.where(chosen == e)
            gate, up = (x[t] @ self.up[e]).chunk(2, -1)
            y = (F.silu(gate) * up) @ self.down[e] + self.bias[e]
            out = out.index_add(0, t, y * weights[t, j, None])
        return out


class Listed(nn.Module):
    """The same contract with a module an expert, of which idle ones are not called."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            t, j = torch.where(chosen == e)
            out = out.index_add(0, t, self.each[e](x[t]) * weights[t, j, None])
        return out


class Block(nn.Module):
    """`skew` is added to the scores: a way to send all tokens to one expert, or none to another."""

    def __init__(self, kind: type[nn.Module], experts: int, k: int, skew: float) -> None:
        super().__init__()
        self.k = k
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = kind(experts, WIDTH, 10)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("skew", skew * torch.eye(experts)[experts - 1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        tokens = y.reshape(-1, y.shape[-1])
        scores, chosen = (self.router(tokens) + self.skew).softmax(-1).topk(self.k, -1)
        routed = self.experts(tokens, chosen, scores / scores.sum(-1, keepdim=True))
        return x + routed.view(*x.shape[:-1], -1) + self.shared(y)


class Tower(nn.Module):
    """Two blocks that `block` makes between an embedding and a head; returns the loss of next tokens, given as labels."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Moe(nn.Module):
    """Returns the loss of next tokens that are given as labels."""

    def __init__(
        self, kind: type[nn.Module] = Experts, experts: int = EXPERTS, k: int = 2, skew: float = 0.0, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(kind, experts, k, skew) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
