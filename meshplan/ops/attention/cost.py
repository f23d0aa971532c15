"""What each method of context attention sends: the calls one by one, as they are made, and the bytes that leave a rank.

With kv the bytes of a rank's keys and values in their dtype, kv* the same in float32 (float64), q and o those of its queries and
result, n ranks, i of them in an inner group and r = n/i in a ring (counted; a rank sends, each way of the network alike):

    ring        forward (n-1) kv                              backward (n-1) (kv + kv*), sent on or pulled
    allgather   forward (n-1) kv                              backward (n-1) (kv + kv*), without kv if what was gathered is kept
    ulysses     forward (n-1)/n (q + kv + o)                  backward the same
    hybrid      forward (i-1)/i (q + kv + o) + (r-1) kv       backward (i-1)/i (q + kv + o) + (r-1) (kv + kv*)

all_gather and reduce_scatter as rings pass n - 1 of n pieces on, an all_to_all keeps one of n (`runtime/recorder.py`). Where key
heads are fewer than the ranks that exchange them, they are repeated: kv there is n/Hkv (i/Hkv) times as much, in float32 on the
way back. A zigzag ring sends a quarter more than causal positions need: what is seen in part is sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshplan.ops.calls import Call
from meshplan.ops.precision import wide
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import wire_bytes


@dataclass(frozen=True)
class Local:
    """What one rank holds of a call: [batch, q_heads, rows, width] queries, kv_heads of keys, and of values of value_width.

    Attributes:
        bias: shape [b, h, rows or 1, S] of a mask given as a tensor, if there is one, and its dtype; bias_grad: whether it gets a
            gradient.
        docs: shape of document ids that are this rank's only, and their dtype.
    """

    batch: int
    q_heads: int
    kv_heads: int
    rows: int
    width: int
    value_width: int
    dtype: torch.dtype
    bias: tuple[Sequence[int], torch.dtype] | None = None
    bias_grad: bool = False
    docs: tuple[Sequence[int], torch.dtype] | None = None

    def elements(self, heads: int, width: int) -> int:
        return self.batch * heads * self.rows * width


def collectives(
    method: str,
    x: Local,
    group: AxisGroup,
    inner_group: AxisGroup | None = None,
    outer_group: AxisGroup | None = None,
    *,
    phase: str = "forward",
    keep_gathered: bool = False,
    transport: str = "send",
) -> list[Call]:
    """What one `context_attention` call makes every rank send in `phase` ("forward" or "backward"), in order.

    Arguments as in `context_attention`.
    """
    backward = phase == "backward"
    kv = x.elements(x.kv_heads, x.width + x.value_width)
    docs: list[Call] = []
    if x.docs is not None and not backward:
        docs = _collective("all_gather", group, math.prod(x.docs[0]) * group.size, x.docs[1])
    if method == "ring":
        return docs + (_pulls if transport == "peer" else _ring)(group, kv, x.dtype, backward)
    if method == "allgather":
        gathered = _collective("all_gather", group, kv * group.size, x.dtype)
        if not backward:
            return docs + gathered
        reduced = _collective("reduce_scatter", group, kv * group.size, wide(x.dtype))
        return reduced if keep_gathered else gathered + reduced
    inner = group if method == "ulysses" or inner_group is None else inner_group
    outer = AxisGroup(group.axis, 1, 0) if method == "ulysses" or outer_group is None else outer_group
    heads = max(x.kv_heads, inner.size)  # repeated where they are fewer
    ring = _ring(outer, x.elements(heads, x.width + x.value_width), x.dtype, backward)
    out = _collective("all_to_all", inner, x.elements(x.q_heads, x.value_width), x.dtype)
    there = _collective("all_to_all", inner, x.elements(x.q_heads, x.width), x.dtype)
    dtype = wide(x.dtype) if backward and heads != x.kv_heads else x.dtype
    for width in (x.width, x.value_width):
        there += _collective("all_to_all", inner, x.elements(heads, width), dtype)
    if backward:
        return out + ring + there + _bias(x, inner, backward)
    return docs + _bias(x, inner, backward) + there + ring + out


def bytes_sent(calls: Sequence[Call], *groups: AxisGroup) -> int:
    """Bytes that one rank sends for `calls` over `groups`, under ring algorithms."""
    sizes = {group.axis: group.size for group in groups}
    return sum(wire_bytes(call.op, call.bytes, sizes[call.axis]) for call in calls)


def _ring(group: AxisGroup, elements: int, dtype: torch.dtype, backward: bool) -> list[Call]:
    hop = [Call(op, group.axis, elements, dtype) for op in ("send", "recv")]
    if backward:
        hop += [Call(op, group.axis, elements, wide(dtype)) for op in ("send", "recv")]
    return hop * (group.size - 1)


def _pulls(group: AxisGroup, elements: int, dtype: torch.dtype, backward: bool) -> list[Call]:
    """A ring whose messages are pulled: all of the keys and values, then all parts of their gradient."""
    found = [Call("peer_pull", group.axis, elements, dtype)] * (group.size - 1)
    return found + [Call("peer_pull", group.axis, elements, wide(dtype))] * (group.size - 1) if backward else found


def _bias(x: Local, inner: AxisGroup, backward: bool) -> list[Call]:
    """How the rows of a mask travel where heads are exchanged; rows that ranks share do not."""
    if x.bias is None or (backward and not x.bias_grad) or x.bias[0][2] == 1:
        return []
    shape, dtype = x.bias
    elements = math.prod(shape)
    sent = torch.uint8 if dtype == torch.bool else dtype
    if shape[1] > 1:
        return _collective("all_to_all", inner, elements, sent)
    if backward:
        return _collective("reduce_scatter", inner, elements * inner.size, wide(x.dtype))
    return _collective("all_gather", inner, elements * inner.size, sent)


def _collective(op: str, group: AxisGroup, elements: int, dtype: torch.dtype) -> list[Call]:
    return [Call(op, group.axis, elements, dtype)] if group.size > 1 else []
