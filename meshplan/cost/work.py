"""The work of one recorded call: multiply-adds counted as two FLOPs, and bytes read and written, forward pass, global shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan.ops.attention.flex import flex_call
from meshplan.ops.attention.sinks import sink_attention
from meshplan.ops.experts.block import Block, Law
from meshplan.ops.experts.call import experts_call

Count = Callable[[Sequence[Tensor], Tensor, tuple[Any, ...]], float]


def _contracted(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    return 2.0 * out.numel() * ins[0].shape[-1]


def _added(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    return 2.0 * out.numel() * ins[1].shape[-1]


def _reversed(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    return 2.0 * out.numel() * ins[0].shape[0 if ins[0].dim() == 1 else -2]


def _einsum(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    terms = str(args[0]).replace(" ", "").partition("->")[0].split(",")
    sizes = {c: n for term, t in zip(terms, ins, strict=False) for c, n in zip(term, t.shape, strict=False)}
    return 2.0 * math.prod(sizes.values()) if len(ins) > 1 else 0.0


def _convolution(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    return 2.0 * out.numel() * ins[1].numel() / max(ins[1].shape[0], 1)


def _attention(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    q, k, v = ins[:3]
    return 2.0 * q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _experts(ins: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]) -> float:
    chosen, parameters = ins[1].numel(), [p for p in ins[3:] if p.dim() > 1]
    packed = all(p.shape[0] == parameters[0].shape[0] for p in parameters) and min(p.dim() for p in parameters) > 2
    experts = parameters[0].shape[0] if packed else 1
    return 2.0 * chosen * sum(p.numel() for p in parameters) / experts


_T = torch.Tensor
FLOPS: dict[Callable[..., Any], Count] = {
    F.linear: _contracted,
    **dict.fromkeys((torch.matmul, _T.matmul, _T.__matmul__, torch.bmm, _T.bmm, torch.mm, _T.mm, torch.mv, _T.mv), _contracted),
    _T.__rmatmul__: _reversed,
    **dict.fromkeys((torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm, torch.addbmm, _T.addbmm), _added),
    experts_call: _experts,
    torch.einsum: _einsum,
    torch.functional.einsum: _einsum,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.scaled_dot_product_attention, flex_call, sink_attention), _attention),
}  # fmt: skip
"""FLOPs of the functions that are mostly arithmetic, by the shapes of their tensors: Korthikanti et al. 2022, appendix A,
count a matrix product of m x k by k x n as 2mkn; causal attention is counted in full."""


def flops(func: Callable[..., Any], args: tuple[Any, ...], ins: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
    """FLOPs of a call forward; 0 for what moves or combines elements one by one."""
    count = FLOPS.get(func)
    return count(ins, outs[0], args) if count is not None and outs and ins else 0.0


def block_flops(own: Block, law: Law, tokens: torch.Tensor) -> float:
    """FLOPs of a block of experts forward: of its matrices, an expert's for each row that it is called with."""
    number = tokens[..., 0].numel()
    every, each = (sum(p.numel() for p in some if p.dim() > 1) for some in (
        own.module.parameters(), (p for e in own.experts() for p in e.parameters()),
    ))  # fmt: skip
    share = law.rows / len(own.each) if own.each else 0.0
    return 2.0 * number * (every - each + share * each)


def touched(func: Callable[..., Any], ins: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
    """Bytes read and written forward; none by what only makes a view."""
    if getattr(func, "__name__", "") in _VIEWS:
        return 0.0
    return float(sum(t.nbytes for t in (*ins, *outs)))


_VIEWS = frozenset(
    "view transpose permute t unsqueeze squeeze expand expand_as view_as split chunk unbind select narrow unflatten flatten "
    "__getitem__ movedim swapaxes detach numpy_T T mT __get__ split_with_sizes tensor_split alias".split()
)
