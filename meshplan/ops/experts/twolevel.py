"""Experts over ranks of several nodes: a token crosses to a node once, and is dealt out there.

Ranks of the group are O nodes of I ranks each, node after node: rank (o, i) is number o I + i.

    rank (o, i)  -- outer: the I-th of every node -->  rank (o', i)  -- inner: one node -->  rank (o', i')

    check     all_reduce of an integer over inner: whether an index names no expert, so that all ranks raise before rows travel
    outer     as once per rank, with nodes for ranks: a row, its indices and weights to each node with experts of its choice
    inner     all-to-all, or once per rank, of what came over outer; weighted and summed on the rank that the row came to
    home      one row a (token, node) over outer

For T tokens a rank, k choices, rows of H numbers, routed evenly, each way:

    across nodes   T O (1 - (1 - 1/O)^k) H (O-1)/O        plain  T k H (O-1)/O,  once per rank  T W (1 - (1 - 1/W)^k) H (O-1)/O
    inside a node  T W (1 - (1 - 1/W)^k) H (I-1)/I        plain inside: T k H (I-1)/I

In half precision sums are rounded once on the rank that a row came to, and once, with `dedup`, on that of the experts. The host
waits for the device twice. The node-limited routing of DeepSeek-V3 (2024, section 3.2.2) is sent the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts.alltoall import alltoall_experts, once_per_rank
from meshplan.ops.experts.contract import Body, Even
from meshplan.runtime.comm import AxisGroup

Levels = tuple[AxisGroup, AxisGroup]
"""The ranks at this one's place in every node, and those of its node."""


def twolevel_experts(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    body: Body,
    experts: int,
    group: AxisGroup,
    levels: Levels,
    dedup: bool = True,
) -> Tensor:
    """`routed_experts` node-first.

    Arguments:
        levels: the outer and the inner group of `group`.
        dedup: inside a node a token travels once per rank and not once per expert.

    Raises:
        PlanError: `experts-levels`, and `expert-index` on all ranks of `group` together.
    """
    outer, inner = levels
    check_levels(group, outer, inner)
    if outer.size == 1:
        return alltoall_experts(tokens, indices, weights, body, experts, inner, dedup)
    if inner.size == 1:
        return alltoall_experts(tokens, indices, weights, body, experts, outer, True)
    wrong = inner.all_reduce((indices >= experts).any().long()[None], "max")[0] > 0
    size, k = indices.shape

    def inside(rows: Tensor, chosen: Tensor, heavy: Tensor, own: list[int]) -> Tensor:
        unique = outer.size * Even.of(size, k, experts, group.size).unique
        assumed = lambda: Even(tuple(own), unique)  # noqa: E731
        return alltoall_experts(rows, chosen, heavy, body, experts // outer.size, inner, dedup, assumed)

    # Ranks of a node tell each other their counts when rows have come; across nodes only numbers of rows are told.
    told = torch.empty((outer.size, 0), dtype=torch.int64, device=indices.device)
    return once_per_rank(
        tokens, indices, weights, inside, experts, outer, told, wrong, lambda: Even.of(size, k, experts, outer.size)
    )


def check_levels(group: AxisGroup, outer: AxisGroup, inner: AxisGroup) -> None:
    """Raises PlanError `experts-levels` unless `group` is `outer` x `inner`, as this rank sees them."""
    if outer.size * inner.size != group.size or outer.rank * inner.size + inner.rank != group.rank:
        raise PlanError(
            f"rank {group.rank} of {group.size} on {group.axis} cannot be rank {inner.rank} of {inner.size} in node {outer.rank} "
            f"of {outer.size}",
            code="experts-levels",
            legal="nodes of consecutive ranks of the group: the outer group's size times the inner one's is its size",
        )
