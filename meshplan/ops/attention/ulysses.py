"""Attention over exchanged heads (Ulysses): a rank computes some heads of the whole sequence; with rings of such groups, hybrid.

    q, k, v    all_to_all to heads    attention of H/n heads over all rows    all_to_all to rows    out
    backward   all_to_all of dout, then of dq, dk and dv

    hybrid     the same inside groups of `inner` neighbours, and rings across them of those that hold the same heads:
               inner 2 of 4 ranks exchange {0, 1} and {2, 3}, and {0, 2} and {1, 3} are rings

(Jacobs et al., "DeepSpeed Ulysses", 2023; Fang and Zhao, "USP", 2024.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshplan.ops.attention.exchange import Exchange
from meshplan.ops.attention.legal import check_heads
from meshplan.ops.attention.mask import Mask, exactly
from meshplan.ops.attention.recognise import by_position
from meshplan.ops.attention.ring import Kept, Ring, attend, attend_backward
from meshplan.ops.attention.sequence import Sequence
from meshplan.ops.derivative import require_first
from meshplan.runtime.comm import AxisGroup


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring) -> Tensor:
    """Attention with heads exchanged among all ranks; arguments and result as `ring_attention`.

    Raises PlanError `context-heads` unless the ranks can share the heads.
    """
    group, sequence = ring.group, ring.sequence
    check_heads(q.shape[1], k.shape[1], group.size, "ulysses")
    alone = ring._replace(sequence=Sequence(sequence.size, 1), group=AxisGroup(group.axis, 1, 0))
    return _apply(q, k, v, mask, alone, Exchange(group, sequence.all_runs()))


def hybrid_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring, inner_group: AxisGroup, outer_group: AxisGroup
) -> Tensor:
    """Attention with heads exchanged in `inner_group` and rings over `outer_group`; arguments and result as `ring_attention`.

    Arguments:
        inner_group: the neighbours in `ring.group` of which rank `ring.group.rank` is number `rank % inner`.
        outer_group: those with this place in every inner group; together an inner group holds what one rank of a coarser
            sequence of the same balance would.

    Raises PlanError `context-heads` unless an inner group can share the heads and divides the ranks.
    """
    group, sequence, inner = ring.group, ring.sequence, inner_group.size
    check_heads(q.shape[1], k.shape[1], group.size, "hybrid", inner)
    assert (outer_group.size * inner, outer_group.rank * inner + inner_group.rank) == (group.size, group.rank)
    coarse = Sequence(sequence.size, outer_group.size, sequence.balance)
    held = sequence.all_runs(outer_group.rank * inner, inner)
    return _apply(q, k, v, mask, ring._replace(sequence=coarse, group=outer_group), Exchange(inner_group, held))


def _apply(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring, exchange: Exchange) -> Tensor:
    return _Exchanged.apply(q, k, v, mask.bias, mask.sink, replace(mask, bias=None, sink=None), ring, exchange)


class _Exchanged(torch.autograd.Function):
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
        exchange: Exchange,
    ) -> Tensor:
        with exactly(q.device):
            mine = exchange.mask(replace(mask, bias=bias, sink=sink), q.shape[1], q.device)
            mine = by_position(mine, ring.sequence.runs(ring.group.rank), q.shape[0])
            heads = exchange.to_heads(q), exchange.keys_to_heads(k), exchange.keys_to_heads(v)
            kept = attend(*heads, mine, ring)
            out = exchange.to_rows(kept.out)
        ctx.save_for_backward(*kept, bias, mine.bias, mine.sink)
        ctx.mask, ctx.ring, ctx.exchange = replace(mine, bias=None, sink=None), ring, exchange
        ctx.heads, ctx.shapes = (q.shape[1], k.shape[1]), (heads[1].shape, heads[2].shape)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("attention")
        *kept, bias, whole_bias, sink = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        mask, dtype, (q_heads, kv_heads) = replace(ctx.mask, bias=whole_bias, sink=sink), kept[0].dtype, ctx.heads
        with exactly(grads[0].device):
            dout = exchange.to_heads(grads[0])
            found = attend_backward(Kept(*kept), dout, ctx.shapes, mask, ctx.ring, ctx.needs_input_grad[3])
            dq = exchange.to_rows(found.q.to(dtype))
            dk, dv = (exchange.keys_to_rows(dx, kv_heads, dtype) for dx in (found.k, found.v))
            dbias = None if found.bias is None else exchange.bias_gradient(found.bias, bias)
            dsink = None if found.sink is None else exchange.sink_gradient(found.sink, q_heads)
        return dq, dk, dv, dbias, dsink, None, None, None
