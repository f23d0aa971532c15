"""Experts over a few ranks by all-gather: everyone sees all tokens, computes its own experts, and a reduce-scatter sums up.

    forward    all_gather of sizes (unless equal), indices, weights, tokens -> own experts -> reduce_scatter
    backward   all_gather of the gradient -> reduce_scatter of that of tokens, then of that of weights

Each rank sends (n-1) T H numbers each way whatever the routing, beside k (n-1) T indices and weights: less than plain all-to-all
where n is below k, never less than once per rank, but no row waits for counts. Ranks with fewer tokens send padding. Sums over
ranks are in the dtype of the tokens. The host waits for the device once for this rank's counts, and once before for sizes unless
these are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan import compat
from meshplan.ops.experts.contract import Job, Routing, apply_body, refuse_indices, spread
from meshplan.ops.experts.legs import gathered, summed, travel
from meshplan.ops.experts.routing import combine, expand, pairs_of, sorted_slots
from meshplan.ops.experts.uneven import padded, sizes_of


def allgather_experts(x: Routing, job: Job, equal: bool = False) -> Tensor:
    """`routed_experts` by all-gather.

    Arguments:
        equal: all ranks have as many tokens as this one; their sizes are then not asked for.

    Raises:
        PlanError: `expert-index`, on all ranks of the group together.
    """
    group, experts = job.group, job.experts
    size, local, k = x.tokens.shape[0], experts // group.size, x.indices.shape[1]
    most = size if equal else max(sizes_of(x.tokens, group))
    group = group if equal else group.uneven()
    chosen = group.all_gather(padded(x.indices, most, -1), 0)
    # Backward walks from the last to the first: on every rank tokens' gradients are summed before those of weights.
    heavy = travel(padded(x.weights, most), gathered(group))
    everyone = travel(padded(x.tokens, most), gathered(group, job.payload), meanwhile=job.meanwhile)
    slots, found = sorted_slots(torch.where(chosen < 0, -1, chosen - group.rank * local), local)
    if compat.is_fake(found):
        counts, bad = spread(chosen.numel(), experts)[group.rank * local :][:local], 0
    else:
        *counts, bad = torch.cat([found, (chosen >= experts).any().long()[None]]).tolist()
    refuse_indices(bool(bad), experts)
    pairs = pairs_of(slots, sum(counts), k)
    y = apply_body(job.body, expand(everyone, pairs), counts)
    return travel(combine(y, heavy, pairs), summed(group), tie=everyone)[:size]
