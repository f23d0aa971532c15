"""Experts over ranks by all-to-all: tokens travel to the ranks of their experts, and results travel home.

With W ranks, E/W experts each:

    counts    all_to_all of [W, E/W] integers; then this rank knows all sizes: the one time the host waits for the device
    forward   all_to_all of a row per (token, expert) -> experts -> all_to_all back -> weighted sum at home
    backward  the same two with gradients: that of a row goes to its expert, that of what the expert read comes home

With `dedup` a row travels once per (token, rank): indices and weights go beside it, the rank of the experts weighs and sums
what a token's experts there give, and one row a (token, rank) comes home. For T tokens a rank, k choices and rows of H numbers,
routed evenly (expected; W - 1 of W rows leave the rank, the others stay):

    plain    T k H (W-1)/W                     dedup   T W (1 - (1 - 1/W)^k) H (W-1)/W        each way

which is a third less at k = 8, W = 8. In half precision the sum of a rank is rounded before it travels, which plain does not do.

Every rank issues the same collectives for any routing, with no token, or no row for its experts, too. What backward needs is
kept: the experts' results on the side that weighs them, and indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshplan import compat
from meshplan.ops.experts.contract import Even, Job, Routing, apply_body, host, refuse_indices
from meshplan.ops.experts.legs import dealt, travel
from meshplan.ops.experts.routing import Pairs, collect, combine, expand, pairs_of, regroup, sorted_slots


def alltoall_experts(x: Routing, job: Job, dedup: bool = False, assumed: Callable[[], Even] | None = None) -> Tensor:
    """`routed_experts` by all-to-all.

    Arguments:
        assumed: what shape-only ranks take the routing for, if not for choices spread evenly.

    Raises:
        PlanError: `expert-index`, on all ranks of the group together.
    """
    group, n, k = job.group, job.group.size, x.indices.shape[1]
    wrong = (x.indices >= job.experts).any()
    assumed = assumed or (lambda: Even.of(x.tokens.shape[0], k, job.experts, n))
    slots, counts = sorted_slots(x.indices, job.experts)
    counts = counts.view(n, -1)
    if dedup and n > 1:

        def inside(arrived: Routing, own: list[int]) -> Tensor:
            there = pairs_of(sorted_slots(arrived.indices, len(own))[0], sum(own), k)
            return combine(apply_body(job.body, expand(arrived.tokens, there), own), arrived.weights, there)

        return once_per_rank(x, job, inside, counts, wrong, assumed)
    came, sent = _exchange_counts(counts, wrong, job, lambda: assumed().by_rank(n))
    send, receive = [sum(row) for row in sent.put], [sum(row) for row in sent.came]
    mine = pairs_of(slots, sum(send), k)
    arrived = travel(expand(x.tokens, mine), dealt(group, send, receive, job.payload), meanwhile=job.meanwhile)
    there, back = regroup(came, sum(receive))
    y = apply_body(job.body, expand(arrived, there), _columns(sent.came))
    home = travel(expand(y, back), dealt(group, receive, send), tie=arrived)
    return combine(home, x.weights, mine)


Inside = Callable[[Routing, list[int]], Tensor]
"""`inside(arrived, own) -> [N, H]`: what this rank's experts make of the N rows that came, weighed and summed. Indices count its
experts from 0 and are negative for other ranks'; `own` is what the ranks told of their choices, summed."""


def once_per_rank(
    x: Routing, job: Job, inside: Inside, told: Tensor, wrong: Tensor, assumed: Callable[[], Even]
) -> Tensor:
    """Send each token once to each rank that has experts of its choice, let these answer, and sum up what comes home.

    Arguments:
        told: integers [n, c] that each rank is told beside the number of rows.
        wrong: boolean [], that an index names no expert; assumed: as in `alltoall_experts`.

    Raises:
        PlanError: `expert-index`, on all ranks of the group together.
    """
    group, n, k, local = job.group, job.group.size, x.indices.shape[1], job.experts // job.group.size
    ranks = torch.arange(n, device=x.indices.device)
    # [T, n]: the rank itself where one of the token's experts is on it.
    owner = torch.div(x.indices, local, rounding_mode="floor")
    goes = (owner[:, :, None] == ranks).any(1)
    slots, rows = sorted_slots(torch.where(goes, ranks, -1), n)
    _, sent = _exchange_counts(torch.cat([rows[:, None], told], 1), wrong, job, lambda: assumed().rows_by_rank(n))
    send, receive = [row[0] for row in sent.put], [row[0] for row in sent.came]
    mine = _narrow(pairs_of(slots, sum(send), n), min(k, n))
    chosen = x.indices[mine.rows] - (mine.slots % n * local)[:, None]
    chosen = torch.where((chosen >= 0) & (chosen < local), chosen, -1).to(torch.int32)
    came = group.all_to_all_uneven(chosen, send, receive)
    # Backward walks from the last to the first: on every rank the gradient of rows comes home before that of weights.
    heavy = travel(expand(x.weights, mine), dealt(group, send, receive))
    arrived = travel(expand(x.tokens, mine), dealt(group, send, receive, job.payload), meanwhile=job.meanwhile)
    answer = inside(Routing(arrived, came, heavy), _columns([row[1:] for row in sent.came]))
    return collect(travel(answer, dealt(group, receive, send), tie=arrived), mine)


def _columns(rows: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _narrow(pairs: Pairs, most: int) -> Pairs:
    """`pairs` with the places of a row's few pairs in front of its empty ones, cut to `most`."""
    place = pairs.place.sort(1).values[:, :most]
    return Pairs(pairs.rows, pairs.slots, place, False)


class _Sizes(NamedTuple):
    """The counts exchange on the host: `put[i]` is what this rank told rank i, `came[i]` what that told."""

    put: list[list[int]]
    came: list[list[int]]


def _exchange_counts(
    put: Tensor, wrong: Tensor, job: Job, assumed: Callable[[], list[list[int]]]
) -> tuple[Tensor, _Sizes]:
    """Tell each rank its row of `put` [n, c]. The one place where the host waits for the device.

    A rank whose indices name no expert tells so instead, so that all raise. Shape-only ranks (fake tensors) take `assumed` for
    what they tell, and what they tell themselves for what they are told.
    """
    put = torch.where(wrong, -1, put)
    came = job.group.all_to_all(put, 0, 0)
    if compat.is_fake(put):
        rows = assumed()
        return came, _Sizes(rows, [rows[job.group.rank]] * job.group.size)
    sizes = host(torch.stack([put, came]))
    refuse_indices(min(min(row) for row in sizes[0] + sizes[1]) < 0, job.experts)
    return came, _Sizes(*sizes)
