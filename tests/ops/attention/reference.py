"""What context attention is compared with: softmax written out on the whole sequence, and ranks that run a method."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.streams import keep_mask
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.sequence import Sequence
from meshplan.runtime.simulated import SimulatedGroups, World

B, D, DV = 2, 5, 3  # odd and unequal on purpose


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem on the whole sequence: `kind` of mask, query and key heads, its size."""

    kind: str = "full"
    heads: int = 4
    kv_heads: int = 2
    size: int = 24
    scale: float | None = None


KINDS = "full causal window band documents bool bool-row bias bias-head bias-row sink dropout".split()
TOLD = "causal window documents packed".split()
"""Masks of position and document that a case hands over as a tensor: `tensor causal`."""


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The whole tensors of a case, those with a gradient: q, k, v, up (the gradient of the result), maybe bias and sink."""
    draw = torch.Generator().manual_seed(case.heads * 100 + case.kv_heads)
    s, h, kv = case.size, case.heads, case.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "q": (B, h, s, D),
        "k": (B, kv, s, D),
        "v": (B, kv, s, DV),
        "up": (B, h, s, DV),
    }
    shapes |= {"bias": (s, s)} if case.kind == "bias" else {}
    shapes |= {"bias": (B, h, s, s)} if case.kind == "bias-head" else {}
    shapes |= {"bias": (B, 1, 1, s)} if case.kind == "bias-row" else {}
    shapes |= {"sink": (h,)} if case.kind == "sink" else {}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def settings(case: Case) -> dict[str, Any]:
    """What `context_attention` is told beside tensors that are split."""
    return {
        "causal": {"is_causal": True},
        "window": {"left": 4, "right": 0},
        "band": {"left": 2, "right": 5},
        "documents": {"right": 0, "docs": documents(case.size)},
        "dropout": {"is_causal": True, "dropout_p": 0.3, "stream": 11},
    }.get(case.kind, {})


def documents(size: int) -> Tensor:
    """Document ids of two rows: three documents of odd lengths, and one row that ends in padding."""
    lengths = torch.tensor([5, 12, size - 17])
    ids = torch.arange(3).repeat_interleave(lengths)
    other = torch.arange(2).repeat_interleave(torch.tensor([7, size - 7]))
    other[-3:] = -1
    return torch.stack([ids, other])


def packed(size: int) -> Tensor:
    """Document ids of two rows without padding."""
    return torch.stack([torch.arange(size) // 7, torch.arange(size) // 11])


def visible(case: Case) -> Tensor:
    """Boolean [B, 1, S, S], from the definition."""
    at, to = torch.arange(case.size).unsqueeze(1), torch.arange(case.size)
    kind = case.kind.removeprefix("tensor ")
    seen = {
        "causal": to <= at,
        "dropout": to <= at,
        "window": (to <= at) & (to >= at - 4),
        "band": (to <= at + 5) & (to >= at - 2),
    }.get(kind, torch.ones(case.size, case.size, dtype=torch.bool))
    if case.kind == "bool":
        seen = torch.rand(case.size, case.size, generator=torch.Generator().manual_seed(3)) > 0.6
        seen[5] = False  # a row that sees nothing
    if case.kind == "bool-row":
        seen = (torch.rand(1, case.size, generator=torch.Generator().manual_seed(4)) > 0.3).expand(case.size, -1)
    seen = seen.expand(B, 1, -1, -1)
    if kind in ("documents", "packed"):
        ids = documents(case.size) if kind == "documents" else packed(case.size)
        seen = seen & (to <= at) & (ids[:, None, :, None] == ids[:, None, None, :]) & (ids[:, None, :, None] >= 0)
    return seen


@functools.cache
def reference(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """out and the gradients of q, k, v, bias and sink on one device, in float64 from inputs that were rounded to `dtype`."""
    x = {name: t.double().requires_grad_() for name, t in tensors(case, dtype).items()}
    group = case.heads // case.kv_heads
    k, v = (x[name].repeat_interleave(group, 1) for name in "kv")
    scores = x["q"] @ k.transpose(-1, -2) * (D**-0.5 if case.scale is None else case.scale)
    if "bias" in x:
        scores = scores + x["bias"]
    seen = visible(case)
    weights = torch.where(seen, (scores - scores.amax(-1, keepdim=True).detach()).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if "sink" in x:
        total = total + (x["sink"].view(-1, 1, 1) - scores.amax(-1, keepdim=True).detach()).exp()
    p = weights / torch.where(total == 0, 1.0, total)
    if case.kind == "dropout":
        shape = (B, case.heads, case.size, case.size)
        p = p * keep_mask(11, shape, (0, 0, 0, 0), shape, 0.3) / 0.7
    out = p @ v
    out.backward(x.pop("up").detach())
    return {"out": out.detach(), **{name: t.grad for name, t in x.items()}}


def on_rank(case: Case, balance: str, groups: Callable[..., Any], dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """One rank's part: cut, attend, backward; the local result and gradients."""
    group = groups("cp")
    sequence = Sequence(case.size, group.size, balance)
    whole = tensors(case, dtype)
    mine = {name: sequence.cut(whole[name], 2, group.rank).requires_grad_() for name in ("q", "k", "v", "up")}
    told = settings(case) | options
    if told.pop("local_docs", False):
        told["docs"] = sequence.cut(told["docs"], 1, group.rank)
    if told["method"] == "hybrid":
        told |= {"inner_group": groups("cp_inner"), "outer_group": groups("cp_outer")}
    if "bias" in whole:
        bias = whole["bias"]
        mine["bias"] = (
            bias if bias.shape[-2] == 1 else sequence.cut(bias, bias.dim() - 2, group.rank)
        ).requires_grad_()
        told["attn_mask"] = mine["bias"]
    if case.kind in ("bool", "bool-row") or case.kind.startswith("tensor"):
        seen = visible(case)
        told["attn_mask"] = seen[:, :, :1] if case.kind == "bool-row" else sequence.cut(seen, 2, group.rank)
    if "sink" in whole:
        mine["sink"] = told["sink"] = whole["sink"].requires_grad_()
    out = context_attention(
        *(mine[x] for x in "qkv"), enable_gqa=True, group=group, sequence=sequence, scale=case.scale, **told
    )
    out.backward(mine.pop("up").detach())
    return {"out": out.detach(), **{name: t.grad for name, t in mine.items()}}


def spec_of(n: int, inner: int | None = None) -> MeshSpec:
    spec = MeshSpec((("cp", n),))
    return spec.split_axis("cp", {"cp_outer": n // inner, "cp_inner": inner}) if inner else spec


def simulated(
    case: Case, n: int, balance: str, inner: int | None = None, dtype: torch.dtype = torch.float64, **options: Any
) -> list[dict[str, Tensor]]:
    """`on_rank` on `n` simulated ranks."""
    world, spec = World(n), spec_of(n, inner)
    return world.run(
        lambda rank: on_rank(case, balance, SimulatedGroups(spec, rank, world=world).group, dtype, options)
    )


def joined(case: Case, ranks: list[dict[str, Tensor]], balance: str) -> dict[str, Tensor]:
    """The ranks' results as whole tensors: shards joined, what ranks have alike summed."""
    sequence, found = Sequence(case.size, len(ranks), balance), {}
    for name in ranks[0]:
        parts = [r[name] for r in ranks]
        if name == "sink" or (case.kind == "bias-row" and name == "bias"):
            found[name] = functools.reduce(torch.add, parts)
        else:
            found[name] = sequence.join(parts, parts[0].dim() - 2)
    return found


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, over its largest entry."""
    assert set(found) == set(expected)
    return {name: float((found[name] - want).abs().max() / want.abs().max()) for name, want in expected.items()}


def check(case: Case, ranks: list[dict[str, Tensor]], balance: str, limit: float = 1e-12) -> None:
    """Fail unless the ranks' results are those of one device."""
    errors = error(joined(case, ranks, balance), reference(case))
    assert all(e < limit for e in errors.values()), (case, balance, errors)
