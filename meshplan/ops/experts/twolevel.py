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
waits for the device twice. "DeepSeek-V3 Technical Report", 2024, section 3.2.2, sends so too: to the rank at the same place in
the node first, then inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts.alltoall import alltoall_experts, once_per_rank
from meshplan.ops.experts.contract import Even, Job, Routing
from meshplan.runtime.comm import AxisGroup

Levels = tuple[AxisGroup, AxisGroup]
"""The ranks at this one's place in every node, and those of its node."""


def twolevel_experts(x: Routing, job: Job, levels: Levels, dedup: bool = True) -> Tensor:
    """`routed_experts` node-first.

    Arguments:
        levels: the outer and the inner group of the job's.
        dedup: inside a node a token travels once per rank and not once per expert.

    Raises:
        PlanError: `experts-levels`, and `expert-index` on all ranks of the group together.
    """
    outer, inner = levels
    check_levels(job.group, outer, inner)
    if outer.size == 1:
        return alltoall_experts(x, job._replace(group=inner), dedup)
    if inner.size == 1:
        return alltoall_experts(x, job._replace(group=outer), True)
    wrong = inner.all_reduce((x.indices >= job.experts).any().long()[None], "max")[0] > 0
    size, k = x.indices.shape
    node = job._replace(experts=job.experts // outer.size, group=inner, meanwhile=None)

    def inside(arrived: Routing, own: list[int]) -> Tensor:
        unique = outer.size * Even.of(size, k, job.experts, job.group.size).unique
        return alltoall_experts(arrived, node, dedup, lambda: Even(tuple(own), unique, k))

    # Ranks of a node tell each other their counts when rows have come; across nodes only numbers of rows are told.
    told = torch.empty((outer.size, 0), dtype=torch.int64, device=x.indices.device)
    even = lambda: Even.of(size, k, job.experts, outer.size)  # noqa: E731
    return once_per_rank(x, job._replace(group=outer), inside, told, wrong, even)


def check_levels(group: AxisGroup, outer: AxisGroup, inner: AxisGroup) -> None:
    """Raises PlanError `experts-levels` unless `group` is `outer` x `inner`, as this rank sees them."""
    if outer.size * inner.size != group.size or outer.rank * inner.size + inner.rank != group.rank:
        raise PlanError(
            f"rank {group.rank} of {group.size} on {group.axis} cannot be rank {inner.rank} of {inner.size} in node {outer.rank} "
            f"of {outer.size}",
            code="experts-levels",
            legal="nodes of consecutive ranks of the group: the outer group's size times the inner one's is its size",
        )
