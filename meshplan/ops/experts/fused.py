"""Experts through the memory of one node's ranks: the kernels on real ranks, and what they send on ranks that are shapes alone.

    told       counts, int32                               peer_push    rows for each rank, choices of each expert
    forward    choices and weights, then rows              peer_push    once a (token, rank), as with `dedup`
               sums of what the experts made               peer_pull
    backward   gradients of these                          peer_push
               gradients of rows, and of weights           peer_pull

What is told of are the rows that leave this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.experts.contract import Even, Job, Routing, apply_body
from meshplan.runtime.comm import AxisGroup

Opener = Callable[[Routing], Any]
"""Gives the `Window` of the ranks, for exchanges such as this one."""


def through_windows(x: Routing, job: Job, window: Any) -> Tensor:
    """`routed_experts` through `window`, or what its opener gives.

    Raises PlanError: `experts-fused` without a window of these ranks and experts, `bad-value` for what only other dispatches do.
    """
    if job.payload is not None or job.meanwhile is not None:
        raise PlanError(
            "fused experts have no payload of their own, and nothing beside the exchange",
            code="bad-value",
            legal="payload=None and meanwhile=None, or dispatch 'alltoall'",
        )
    group = job.group
    if compat.is_fake(x.tokens):
        return _shapes(x, job)
    if callable(window):
        window = window(x)
    fits = window is not None and (window.sizes.ranks, window.sizes.experts) == (group.size, job.experts)
    if not fits or window.held != [group.rank]:
        raise PlanError(
            f"fused experts on {group.axis} of {group.size} ranks have no window into their memory",
            code="experts-fused",
            legal="dispatch: alltoall, allgather; or a window of these ranks and experts, where GPUs reach each other's memory",
        )
    from meshplan.kernels.experts.fused import fused_experts

    return fused_experts([x.tokens], [x.indices], [x.weights], [job.body], window)[0]


class _Leaves(NamedTuple):
    """What leaves a rank that is shapes alone: rows there and home, and the same of others that come here."""

    group: AxisGroup
    rows: int
    came: int
    k: int
    width: int
    dtype: torch.dtype
    weights_dtype: torch.dtype

    def tell(self, op: str, width: int, dtype: torch.dtype) -> None:
        self.group.through_memory(op, torch.empty(self.rows, width, dtype=dtype))


def _shapes(x: Routing, job: Job) -> Tensor:
    group, n, k = job.group, job.group.size, x.indices.shape[1]
    even = Even.of(x.tokens.shape[0], k, job.experts, n).rows_by_rank(n)
    rows = [row[0] for row in even]
    heavy = torch.float64 if x.tokens.dtype == torch.float64 else torch.float32
    leaves = _Leaves(
        group, sum(rows) - rows[group.rank], rows[group.rank] * n, k, x.tokens.shape[1], x.tokens.dtype, heavy
    )
    group.through_memory("peer_push", torch.empty(n - 1, 1 + n + job.experts, dtype=torch.int32))
    counts = [count * n for count in even[group.rank][1:]]
    rows_here, weights_here = _Push.apply(x.tokens, x.weights, leaves, sum(counts))
    return _Pull.apply(apply_body(job.body, rows_here, counts), weights_here, leaves, x.tokens.shape[0])  # type: ignore[no-any-return]


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, leaves: _Leaves, pairs: int) -> tuple[Tensor, Tensor]:
        ctx.leaves, ctx.like = leaves, (tokens.new_empty(0), weights.new_empty(0), tokens.shape, weights.shape)
        leaves.tell("peer_push", leaves.k, torch.int32)
        leaves.tell("peer_push", leaves.k, leaves.weights_dtype)
        leaves.tell("peer_push", leaves.width, leaves.dtype)
        return tokens.new_empty(pairs, leaves.width), weights.new_empty(leaves.came, leaves.k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, shape, weights_shape = ctx.like
        ctx.leaves.tell("peer_pull", ctx.leaves.width, ctx.leaves.dtype)
        ctx.leaves.tell("peer_pull", ctx.leaves.k, ctx.leaves.weights_dtype)
        return tokens.new_empty(shape), weights.new_empty(weights_shape), None, None


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, leaves: _Leaves, tokens: int) -> Tensor:
        ctx.leaves = leaves
        ctx.save_for_backward(y, weights)
        leaves.tell("peer_pull", leaves.width, leaves.dtype)
        return y.new_empty(tokens, leaves.width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.leaves.tell("peer_push", ctx.leaves.width, ctx.leaves.dtype)
        y, weights = ctx.saved_tensors
        return torch.empty_like(y), torch.empty_like(weights), None, None
