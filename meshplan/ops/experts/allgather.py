"""Experts over a few ranks by all-gather: everyone sees all tokens, computes its own experts, and a reduce-scatter sums up.

    forward    all_gather of sizes (unless equal), indices, weights, tokens -> own experts -> reduce_scatter
    backward   all_gather of the gradient -> reduce_scatter of that of tokens, then of that of weights

Each rank sends (n-1) T H numbers each way whatever the routing, beside k (n-1) T indices and weights: less than plain all-to-all
where n is below k, never less than once per rank, but no row waits for counts. Ranks with fewer tokens send padding. Sums over
ranks are in the dtype of the tokens. The host waits for the device once for this rank's counts, and once before for sizes unless
these are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.ops.derivative import require_first
from meshplan.ops.experts.contract import Body, apply_body, refuse_indices, spread
from meshplan.ops.experts.routing import combine, expand, pairs_of, sorted_slots
from meshplan.ops.experts.uneven import padded, sizes_of
from meshplan.runtime.comm import AxisGroup


def allgather_experts(
    tokens: Tensor, indices: Tensor, weights: Tensor, body: Body, experts: int, group: AxisGroup, equal: bool = False
) -> Tensor:
    """`routed_experts` by all-gather.

    Arguments:
        equal: all ranks have as many tokens as this one; their sizes are then not asked for.

    Raises:
        PlanError: `expert-index`, on all ranks of `group` together.
    """
    size, local, k = tokens.shape[0], experts // group.size, indices.shape[1]
    most = size if equal else max(sizes_of(tokens, group))
    chosen = group.all_gather(padded(indices, most, -1), 0)
    # Backward walks from the last to the first: on every rank tokens' gradients are summed before those of weights.
    heavy = _Gather.apply(padded(weights, most), group)
    everyone = _Gather.apply(padded(tokens, most), group)
    slots, found = sorted_slots(torch.where(chosen < 0, -1, chosen - group.rank * local), local)
    if compat.is_fake(found):
        counts, bad = spread(chosen.numel(), experts)[group.rank * local :][:local], 0
    else:
        *counts, bad = torch.cat([found, (chosen >= experts).any().long()[None]]).tolist()
    refuse_indices(bool(bad), experts)
    pairs = pairs_of(slots, sum(counts), k)
    y = apply_body(body, expand(everyone, pairs), counts)
    return _Scatter.apply(combine(y, heavy, pairs), everyone, group)[:size]  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        out = group.all_gather(x, 0)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first("experts")
        return ctx.group.reduce_scatter(grad, 0), None


class _Scatter(torch.autograd.Function):
    """`tie` as in `alltoall.py`: the gathered tokens, whose backward is a collective on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        out = group.reduce_scatter(x, 0)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        require_first("experts")
        return ctx.group.all_gather(grad, 0), None, None
