"""What a layout of tokens sends around their dispatch, call by call.

T tokens on a rank, c ranks with copies, e of etp, rows of H numbers of b bytes; weights and indices come to 2k numbers beside H:

    copies, kind I          forward (c-1)/c T H b      backward (c-1)/c T H b
    copies, kind R          the same                   the same
    etp, tokens of its own  2 (e-1) T H b              2 (e-1) T H b
    etp, copies             2 (e-1)/e T' H b           the same, T' the tokens of a share (T/c)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshplan.ops.calls import Call
from meshplan.ops.experts.cost import Sent
from meshplan.ops.experts.layout import TokenLayout
from meshplan.runtime.comm import AxisGroup, chunk_size


def sends_around(
    layout: TokenLayout,
    tokens: Sequence[int],
    k: int,
    width: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    *,
    indices_dtype: torch.dtype = torch.int64,
    phase: str = "forward",
    tokens_grad: bool = True,
    weights_grad: bool = True,
) -> tuple[list[Sent], list[Sent]]:
    """What this rank sends in `phase` before the calls of the dispatch itself, and after them, in order.

    Arguments:
        tokens: this rank's number of them, or that of each rank of `etp` where these have tokens of their own.
        others: as in `cost.sends`.
    """
    rows, weights, copies = (width, dtype), (k, weights_dtype), layout.copies
    own = tokens[layout.etp.rank if layout.etp is not None and len(tokens) > 1 else 0]
    if copies is not None:
        tokens = [chunk_size(size, copies.size, copies.rank) for size in tokens]
    before, after = _etp(layout, tokens, rows, weights, (k, indices_dtype), phase, tokens_grad, weights_grad)
    if copies is None or copies.size == 1:
        return before, after
    # Every piece travels as long as the longest.
    whole = -(-own // copies.size) * copies.size
    gather = [_ring("all_gather", copies, whole, rows)]
    if phase == "forward":
        return before, after + gather
    if layout.kind == "R":
        return [_ring("reduce_scatter", copies, whole, rows), *before], after
    back = [_ring("all_gather", copies, whole, weights)] * weights_grad + gather * tokens_grad
    return before, after + back


def _etp(
    layout: TokenLayout,
    tokens: Sequence[int],
    rows: tuple[int, torch.dtype],
    weights: tuple[int, torch.dtype],
    indices: tuple[int, torch.dtype],
    phase: str,
    tokens_grad: bool,
    weights_grad: bool,
) -> tuple[list[Sent], list[Sent]]:
    etp, forward = layout.etp, phase == "forward"
    if etp is None or etp.size == 1:
        return [], []
    if layout.etp_copies:
        whole = [_ring("all_reduce", etp, tokens[0], rows)]
        if forward:
            return [], whole
        if layout.kind == "R":
            return whole, []
        return [], [_ring("all_reduce", etp, tokens[0], weights)] * weights_grad + whole * tokens_grad
    most = max(tokens) * etp.size
    if forward:
        sizes = [] if layout.equal else [_ring("all_gather", etp, etp.size, (1, torch.int64))]
        gathers = [_ring("all_gather", etp, most, each) for each in (rows, weights, indices)]
        return sizes + gathers, [_ring("reduce_scatter", etp, most, rows)]
    summed = [_ring("reduce_scatter", etp, most, weights)] * weights_grad
    return [_ring("all_gather", etp, most, rows)], summed + [_ring("reduce_scatter", etp, most, rows)] * tokens_grad


def _ring(op: str, group: AxisGroup, rows: int, each: tuple[int, torch.dtype]) -> Sent:
    """`op` on a full tensor of `rows`, by rings (see `recorder.wire_bytes`)."""
    n, elements = group.size, rows * each[0]
    leave = (2 if op == "all_reduce" else 1) * (n - 1) * elements // n
    return Sent(Call(op, group.axis, elements, each[1]), leave)
