"""Mixtures of experts as they stand in plain models: blocks whose own forward routes, and loops over a list of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, EXPERTS = 37, 12, 8


class Expert(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int = WIDTH, inner: int = 10) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Masked(nn.Module):
    """The block of Mixtral as it was first published in transformers: every expert is called, with rows or without, and the
    scores of the router come back flattened beside the result. `skew` is added to the scores of the last expert."""

    def __init__(self, experts: int = EXPERTS, k: int = 2, skew: float = 0.0) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.register_buffer("skew", skew * torch.eye(experts)[experts - 1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.view(-1, shape[-1])
        logits = self.gate(x) + self.skew
        weights, chosen = logits.softmax(-1).topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, top = torch.where(mask[e])
            rows = x[None, top].reshape(-1, shape[-1])
            out.index_add_(0, top, expert(rows) * weights[top, slot, None])
        return out.reshape(shape), logits


class Counting(nn.Module):
    """DeepSeek-V3's block in a loop: idle experts are skipped, shared ones added, and a bias steers the choice, which somebody
    moves between steps by `load`, the number of tokens that each expert got. `calls` counts forwards."""

    def __init__(self, experts: int = EXPERTS, k: int = 2, skew: float = 0.0) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Parameter(torch.randn(experts, WIDTH) / WIDTH**0.5)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.shared = Expert(inner=7)
        self.register_buffer("bias", torch.linspace(0, 0.3, experts) + skew * torch.eye(experts)[experts - 1])
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = F.linear(tokens, self.gate).sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.k, -1).indices
        weights = scores.gather(1, chosen)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        with torch.no_grad():
            self.load += counts
            self.calls += 1
        out = torch.zeros_like(tokens)
        for e, number in enumerate(counts.tolist()):
            if number == 0:
                continue
            t, j = torch.where(chosen == e)
            out[t] += self.experts[e](tokens[t]) * weights[t, j, None]
        return out.view_as(x) + self.shared(x)


class Sorted(nn.Module):
    """Tokens sorted by expert, one slice each, rows weighed before the expert: experts are a dict beside others that have no
    parameters."""

    def __init__(self, experts: int = EXPERTS, k: int = 2, skew: float = 0.0) -> None:
        super().__init__()
        self.k, self.skew = k, skew
        self.router = nn.Linear(WIDTH, experts + 1)
        made = {
            f"expert_{e}": nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)) for e in range(experts)
        }
        self.experts = nn.ModuleDict(made | {"copy": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        logits = torch.cat([logits[:, :-2], logits[:, -2:-1] + self.skew, logits[:, -1:]], 1)
        weights, chosen = logits.softmax(-1).topk(self.k, -1)
        order = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        rows = (tokens[order // self.k] * weights.flatten()[order, None]).split(sizes)
        made = [expert(part) for expert, part in zip(self.experts.values(), rows, strict=True) if len(part)]
        return torch.zeros_like(tokens).index_add(0, order // self.k, torch.cat(made)).view(x.shape)


class Layer(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), kind(**options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out = self.moe(self.norm(x))
        y, logits = out if isinstance(out, tuple) else (out, None)
        return x + y, logits


class Looped(nn.Module):
    """Returns the loss of next tokens that are given as labels, and a load-balance loss of each layer that hands out scores."""

    def __init__(self, kind: type[nn.Module] = Masked, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(kind, **options) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, balance = self.embed(tokens), []
        for layer in self.layers:
            x, logits = layer(x)
            if logits is not None:
                p = logits.softmax(-1)
                chosen = F.one_hot(p.topk(2, -1).indices, p.shape[-1]).sum(1).to(p.dtype)
                balance.append((chosen.mean(0) * p.mean(0)).sum() * p.shape[-1])
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.1 * sum(balance) if balance else loss
