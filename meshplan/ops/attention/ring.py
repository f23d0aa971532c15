"""Ring attention: keys and values go around the ranks (`travel.py`) while each rank computes on those at hand.

The state of a row is carried in float32 (float64) over all hops and rounded once; so are dq and the gradients of keys and values.
Whatever the mask, every rank makes the same exchanges; what its positions cannot see it lets pass without computing. Grouped keys
travel as they are. (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshplan.ops.attention import block as plain
from meshplan.ops.attention.mask import Mask, exactly, fold, sink_gradient, unfold
from meshplan.ops.attention.message import pack, unpack
from meshplan.ops.attention.sequence import Sequence
from meshplan.ops.attention.travel import travel
from meshplan.ops.derivative import require_first
from meshplan.ops.precision import wide
from meshplan.runtime.comm import AxisGroup


class Ring(NamedTuple):
    """What a ring is told besides tensors: how to compute a block (a module like `block.py`), the scale of the scores, how the
    sequence lies on the ranks, these, and how messages travel."""

    block: Any
    scale: float
    sequence: Sequence
    group: AxisGroup
    transport: str = "send"

    def able(self, mask: Mask) -> Any:
        """What computes a block under `mask`: tensors and dropout are taken by the plain one only."""
        return self.block if mask.bias is None and mask.dropped is None else plain


class Kept(NamedTuple):
    """What backward needs of forward, with the KV that it begins with in one message."""

    q: Tensor
    message: Tensor
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """In wide precision, `bias` and `sink` this rank's share."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring) -> Kept:
    """Attention of local `q` [B, H, S/n, D] over the `k` and `v` [B, Hkv, S/n, ...] of all ranks, as plain tensors."""
    _, scale, sequence, group, transport = ring
    block, mine, way = ring.able(mask), sequence.runs(group.rank), travel(transport, group)
    state = block.new_state(q, v)
    own = pack(k, v)
    for source, message in way.out(own):
        keys, values = unpack(message, k.shape, v.shape)
        fold(block, state, q, keys, values, mine, sequence.runs(source), mask, scale)
    out, lse = block.finish(state, q.dtype, mask.sink)
    return Kept(q, way.kept(own, message), out, lse)


def attend_backward(
    kept: Kept, dout: Tensor, shapes: tuple[torch.Size, torch.Size], mask: Mask, ring: Ring, bias_grad: bool
) -> Gradients:
    """The gradients of `attend` for the gradient `dout` of its result, with the shapes of a rank's k and v; that of `mask.bias`
    only with `bias_grad`."""
    _, scale, sequence, group, transport = ring
    q, first, out, lse = kept
    block, mine, way = ring.able(mask), sequence.runs(group.rank), travel(transport, group)
    delta, dtype = block.delta(out, dout), wide(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dbias = torch.zeros_like(mask.bias, dtype=dtype) if bias_grad and mask.bias is not None else None
    for source, message in way.back(first):
        keys, values = unpack(message, *shapes)
        dmessage = message.new_zeros(message.shape, dtype=dtype)
        dk, dv = unpack(dmessage, *shapes)
        at = (mine, sequence.runs(source))
        unfold(block, q, keys, values, dout, lse, delta, *at, mask, scale, dq, dk, dv, dbias)
        way.give(source, dmessage)
    dk, dv = unpack(way.home(), *shapes)
    dsink = None if mask.sink is None else sink_gradient(mask.sink, lse, delta)
    return Gradients(dq, dk, dv, dbias, dsink)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring) -> Tensor:
    """Attention of this rank's queries over the keys and values of all ranks of a ring.

    Arguments:
        q: [B, H, S/n, D]; k, v: [B, Hkv, S/n, D] and [B, Hkv, S/n, Dv], this rank's shards in the order of `ring.sequence`.
        mask: with a bias whose rows are those of `q`.

    Returns:
        [B, H, S/n, Dv] in the dtype of `q`. A shard's gradient is that of the shard; a bias or sink that all ranks have alike
        gets this rank's summand.
    """
    return _Ring.apply(q, k, v, mask.bias, mask.sink, replace(mask, bias=None, sink=None), ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, mask: Mask, ring: Ring
    ) -> Tensor:
        with exactly(q.device):
            kept = attend(q, k, v, replace(mask, bias=bias, sink=sink), ring)
        ctx.save_for_backward(*kept, bias, sink)
        ctx.mask, ctx.ring, ctx.shapes = mask, ring, (k.shape, v.shape)
        return kept.out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("attention")
        *kept, bias, sink = ctx.saved_tensors
        mask = replace(ctx.mask, bias=bias, sink=sink)
        with exactly(grads[0].device):
            found = attend_backward(Kept(*kept), grads[0], ctx.shapes, mask, ctx.ring, ctx.needs_input_grad[3])
        dtype, dbias = kept[0].dtype, None if found.bias is None else found.bias.to(bias.dtype)
        return found.q.to(dtype), found.k.to(dtype), found.v.to(dtype), dbias, found.sink, None, None
