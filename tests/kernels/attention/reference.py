"""What the attention kernels are compared with: softmax written out in float64, and its gradients by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.ops.attention.block import Span

OUTSIDE = float("nan")


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention, each a slice of storage that is full of nan elsewhere, rows before heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    scale: float
    q_docs: Tensor | None = None
    k_docs: Tensor | None = None

    @property
    def docs(self) -> tuple[Tensor | None, Tensor | None]:
        return self.q_docs, self.k_docs


@dataclass(frozen=True)
class Outcome:
    """Result and gradients."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def errors(self, other: Outcome) -> dict[str, float]:
        """Largest difference of each tensor from `other`'s, inf where there is nan. Of the largest value there; of the largest
        of all gradients, where one may be zero."""
        size = {name: _largest(getattr(other, name)) for name in ("out", "lse")}
        gradients = max(_largest(x) for x in (other.dq, other.dk, other.dv))
        found = {}
        for name in ("out", "lse", "dq", "dk", "dv"):
            mine, theirs = getattr(self, name).double(), getattr(other, name).double()
            same = mine == theirs  # -inf is -inf
            apart = (mine - theirs).masked_fill(same, 0.0).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max()
            found[name] = apart.item() / (size.get(name, gradients) or 1.0)
        return found

    def check(self, other: Outcome, tolerance: float) -> None:
        errors = self.errors(other)
        assert max(errors.values()) <= tolerance, errors


def _largest(x: Tensor) -> float:
    return x.abs().nan_to_num(0.0, posinf=0.0).max().item()


def problem(
    lq: int,
    lk: int,
    d: int,
    dv: int | None = None,
    heads: tuple[int, int] = (2, 1),
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    docs: tuple[list[int], list[int]] | None = None,
    seed: int = 0,
) -> Problem:
    draw = torch.Generator().manual_seed(seed)
    dv = d if dv is None else dv

    def tensor(h: int, length: int, width: int) -> Tensor:
        around = torch.full((batch, length + 3, h + 1, width + 8), OUTSIDE, dtype=dtype)
        inside = around[:, 1 : length + 1, :h, :width]
        inside.copy_(torch.randn(inside.shape, generator=draw))
        return inside.transpose(1, 2)

    ids = [None, None] if docs is None else [torch.tensor([d] * batch, dtype=torch.int32) for d in docs]
    q, k, v, dout = (
        tensor(*shape) for shape in ((heads[0], lq, d), (heads[1], lk, d), (heads[1], lk, dv), (heads[0], lq, dv))
    )
    return Problem(q, k, v, dout, d**-0.5, *ids)


def visible(p: Problem, span: Span) -> Tensor:
    """Which query sees which key, broadcast to [B, H, Lq, Lk]: one pair after the other."""
    lq, lk = p.q.shape[2], p.k.shape[2]
    seen = torch.zeros(p.q.shape[0], 1, lq, lk, dtype=torch.bool)
    for b in range(p.q.shape[0]):
        for i in range(lq):
            for j in range(lk):
                pq, pk = span.q_start + i, span.k_start + j
                ok = (span.left is None or pk >= pq - span.left) and (span.right is None or pk <= pq + span.right)
                if p.q_docs is not None and p.k_docs is not None:
                    ok = ok and bool(p.q_docs[b, i] == p.k_docs[b, j]) and bool(p.q_docs[b, i] >= 0)
                seen[b, 0, i, j] = ok
    return seen


def expected(p: Problem, span: Span, sink: Tensor | None = None) -> Outcome:
    """Result and gradients in float64."""
    q, k, v = (x.detach().double().clone().requires_grad_() for x in (p.q, p.k, p.v))
    group = q.shape[1] // k.shape[1]
    seen = visible(p, span)
    s = (q * p.scale) @ k.repeat_interleave(group, 1).transpose(-1, -2)
    s = torch.where(seen, s, 0.0)
    extra = torch.full((q.shape[1], 1, 1), -float("inf")).double() if sink is None else sink.double().view(-1, 1, 1)
    top = torch.maximum(s.detach().masked_fill(~seen, -float("inf")).amax(-1, keepdim=True), extra)
    base = top.masked_fill(top == -float("inf"), 0.0)
    e = (s - base).exp() * seen
    total = e.sum(-1, keepdim=True) + (extra - base).exp()
    out = e @ v.repeat_interleave(group, 1) / total.masked_fill(total == 0, 1.0)
    out.backward(p.dout.double())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return Outcome(out.detach(), (base + total.log()).squeeze(-1).detach(), q.grad, k.grad, v.grad)
