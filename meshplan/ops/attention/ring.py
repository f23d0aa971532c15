"""Ring attention: keys and values go around the ranks while each rank computes on those at hand.

    forward   hop 0: own KV, hop 1: that of the rank before, ...     KV goes on n - 1 times, sent before it is computed on
    backward  begins with the KV that came last, and walks back: own KV comes last. The gradient of a KV travels with it, is
              added to at each rank and ends at home: KV and dKV go back n - 1 times each

(Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; walking back from where forward ended as in
TransformerEngine's `AttnFuncWithCPAndKVP2P`.) The state of a row is carried in float32 (float64) over all hops and rounded
once; so are dq and the dKV that travels. The order of all sums is fixed. Whatever the mask, every rank makes the same
exchanges; what its positions cannot see it passes on without computing. Grouped keys travel as they are.
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
from meshplan.ops.derivative import require_first
from meshplan.ops.precision import wide
from meshplan.runtime.comm import AxisGroup


class Ring(NamedTuple):
    """What a ring is told besides tensors: how to compute a block (a module like `block.py`), the scale of the scores, how the
    sequence lies on the ranks, and these."""

    block: Any
    scale: float
    sequence: Sequence
    group: AxisGroup

    def able(self, mask: Mask) -> Any:
        """What computes a block under `mask`: tensors and dropout are taken by the plain one only."""
        return self.block if mask.bias is None and mask.dropped is None else plain


class Kept(NamedTuple):
    """What backward needs of forward, the KV that came last in one message."""

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
    _, scale, sequence, group = ring
    block, n, rank = ring.able(mask), group.size, group.rank
    state = block.new_state(q, v)
    message = pack(k, v)
    for hop in range(n):
        coming = group.shift(message) if hop < n - 1 else None
        keys, values = unpack(message, k.shape, v.shape)
        fold(block, state, q, keys, values, sequence.runs(rank), sequence.runs((rank - hop) % n), mask, scale)
        if coming is not None:
            message = coming.wait()
    out, lse = block.finish(state, q.dtype, mask.sink)
    return Kept(q, message, out, lse)


def attend_backward(
    kept: Kept, dout: Tensor, shapes: tuple[torch.Size, torch.Size], mask: Mask, ring: Ring, bias_grad: bool
) -> Gradients:
    """The gradients of `attend` for the gradient `dout` of its result, with the shapes of a rank's k and v; that of `mask.bias`
    only with `bias_grad`."""
    _, scale, sequence, group = ring
    q, message, out, lse = kept
    block, n, rank, dtype = ring.able(mask), group.size, group.rank, wide(q.dtype)
    delta = block.delta(out, dout)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dbias = torch.zeros_like(mask.bias, dtype=dtype) if bias_grad and mask.bias is not None else None
    returning = None
    for hop in range(n):
        coming = group.shift(message, -1) if hop < n - 1 else None
        keys, values = unpack(message, *shapes)
        dmessage = message.new_zeros(message.shape, dtype=dtype)
        dk, dv = unpack(dmessage, *shapes)
        at = (sequence.runs(rank), sequence.runs((rank + 1 + hop) % n))
        unfold(block, q, keys, values, dout, lse, delta, *at, mask, scale, dq, dk, dv, dbias)
        if returning is not None:
            dmessage.add_(returning.wait())
        if coming is not None:
            # It travels while the next keys are computed on.
            returning = group.shift(dmessage, -1)
            message = coming.wait()
    dk, dv = unpack(dmessage, *shapes)
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
