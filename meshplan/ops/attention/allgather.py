"""Attention over gathered keys: every rank has all keys and values for the time it computes, and its own queries.

    forward   one all_gather of K and V in one message, then local rows against the whole
    backward  the same all_gather again, unless kept; one reduce_scatter of the gradients of K and V

The gradients are summed in float32 (float64): a reduction in bfloat16 would round once a rank, and its error would grow with the
ranks, for half of the bytes (n/(n-1) of what the ring's dKV needs in float32 too). The gathered K and V are S x Hkv x (D + Dv) of
memory a layer; kept until backward they cost what context parallelism is there to avoid, so they are gathered again by default.
(Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshplan.ops.attention.mask import Mask, exactly, fold, sink_gradient, unfold
from meshplan.ops.attention.message import pack, unpack
from meshplan.ops.attention.ring import Ring
from meshplan.ops.derivative import require_first
from meshplan.ops.precision import wide


def allgather_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring, keep: bool = False) -> Tensor:
    """Attention of this rank's queries over the gathered keys and values; arguments and result as `ring_attention`.

    Arguments:
        keep: hold the gathered keys and values until backward, which saves their second gather.
    """
    return _AllGather.apply(q, k, v, mask.bias, mask.sink, replace(mask, bias=None, sink=None), ring, keep)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: Mask,
        ring: Ring,
        keep: bool,
    ) -> Tensor:
        _, scale, sequence, group, _ = ring
        keys, values = _gathered(k, v, ring)
        full = replace(mask, bias=bias, sink=sink)
        block = ring.able(full)
        with exactly(q.device):
            state = block.new_state(q, v)
            fold(block, state, q, keys, values, sequence.runs(group.rank), ((0, sequence.size),), full, scale)
            out, lse = block.finish(state, q.dtype, sink)
        ctx.save_for_backward(q, *((keys, values) if keep else (k, v)), out, lse, bias, sink)
        ctx.mask, ctx.ring, ctx.keep = mask, ring, keep
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("attention")
        q, k, v, out, lse, bias, sink = ctx.saved_tensors
        _, scale, sequence, group, _ = ctx.ring
        full = replace(ctx.mask, bias=bias, sink=sink)
        block = ctx.ring.able(full)
        keys, values = (k, v) if ctx.keep else _gathered(k, v, ctx.ring)
        dtype = wide(q.dtype)
        with exactly(q.device):
            delta = block.delta(out, grads[0])
            dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, keys, values))
            dbias = torch.zeros_like(bias, dtype=dtype) if ctx.needs_input_grad[3] else None
            at = (sequence.runs(group.rank), ((0, sequence.size),))
            unfold(block, q, keys, values, grads[0], lse, delta, *at, full, scale, dq, dk, dv, dbias)
            dsink = None if sink is None else sink_gradient(sink, lse, delta)
        shards = [(sequence.cut(dk, 2, r), sequence.cut(dv, 2, r)) for r in range(group.size)]
        mine = group.reduce_scatter(torch.cat([pack(*shard) for shard in shards]), 0)
        dk, dv = unpack(mine, *(x.shape for x in shards[0]))
        dbias = None if dbias is None else dbias.to(bias.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, dsink, None, None, None


def _gathered(k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """All keys and all values, in true order."""
    everyone = ring.group.all_gather(pack(k, v), 0).view(ring.group.size, -1)
    keys, values = zip(*(unpack(message, k.shape, v.shape) for message in everyone.unbind(0)), strict=True)
    return ring.sequence.join(keys, 2), ring.sequence.join(values, 2)
