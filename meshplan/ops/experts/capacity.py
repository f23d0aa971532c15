"""Experts that take no more than their share: which choices are dropped, as one device decides on the whole batch.

The definition, on the batch of all ranks: of R routed choices (negative indices are none) each of E experts takes at most

    C = ceil(factor R / E)

and drops what is over,

    position   the choices of the latest tokens; of one token, its later choice
    score      those of the smallest weight; among equal weights, those of the latest tokens

A token's place is its rank's place in the group, then its row (dims of the batch cut rank after rank), or its entry of
`positions`. A dropped choice has a negative index from then on: it does not travel, adds nothing and has no gradient; the
weights of the others stay as they are. Without `capacity_factor` nothing is ever dropped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.experts.routing import sorted_slots
from meshplan.ops.experts.uneven import gather_rows, sizes_of
from meshplan.runtime.comm import AxisGroup

POLICIES = ("position", "score")


def limit(
    indices: Tensor,
    weights: Tensor,
    *,
    experts: int,
    capacity_factor: float | None,
    group: AxisGroup,
    policy: str = "position",
    positions: Tensor | None = None,
) -> Tensor:
    """`indices` with -1 for the choices that are dropped. Choices that are over are the same on any number of ranks.

    Arguments:
        indices: integers [T, k]; weights: [T, k], read by `score` only.
        capacity_factor: None drops nothing and sends nothing.
        group: the ranks that the batch is split over, all data ranks, in the order of the batch.
        policy: `position`, for one all_gather of E integers, or `score`, for one of a size and one each of indices, weights and
            positions, if given.
        positions: int64 [T], each token's place in the global batch (as where a sequence is cut over cp): sent as for `score`.

    Raises:
        PlanError: `bad-value` for an unknown policy, or a factor that is not positive.
    """
    if policy not in POLICIES:
        raise PlanError(f"choices cannot be dropped by {policy!r}", code="bad-value", legal=list(POLICIES))
    if capacity_factor is None:
        return indices
    if not (capacity_factor > 0 and math.isfinite(capacity_factor)):
        raise PlanError(
            f"capacity_factor {capacity_factor} leaves experts nothing",
            code="bad-value",
            legal="a positive number, or None",
        )
    if policy == "position" and positions is None:
        slots, counts = sorted_slots(indices, experts)
        everyone = group.all_gather(counts, 0).view(-1, experts)
        before = everyone[: group.rank].sum(0)
        most = _capacity(everyone.sum(), capacity_factor, experts)
        return _within(indices, slots, counts, before, most, experts)
    sizes = sizes_of(indices, group)
    chosen = gather_rows(indices, sizes, group)
    scores = gather_rows(weights.detach(), sizes, group) if policy == "score" else None
    order = torch.arange(chosen.numel(), device=chosen.device)
    if positions is not None:
        rows = gather_rows(positions, sizes, group).sort(stable=True).indices
        order = order.view(chosen.shape)[rows].flatten()
    if scores is not None:
        order = order[scores.flatten()[order].sort(stable=True, descending=True).indices]
    kept = _kept(chosen, order, capacity_factor, experts)
    start = sum(sizes[: group.rank])
    return torch.where(kept[start : start + indices.shape[0]], indices, -1)


def collectives(
    tokens: tuple[int, ...],
    k: int,
    experts: int,
    group: AxisGroup,
    *,
    policy: str = "position",
    positions: bool = False,
    weights_dtype: torch.dtype = torch.float32,
) -> list[Call]:
    """What one `limit` sends forward; backward sends nothing.

    Arguments:
        tokens: on each rank; positions: whether they are given.
    """
    n, axis = group.size, group.axis
    if n == 1:
        return []
    if policy == "position" and not positions:
        return [Call("all_gather", axis, n * experts, torch.int64)]
    most = max(tokens) * n
    sent = [(most * k, torch.int64)]
    sent += [(most * k, weights_dtype)] if policy == "score" else []
    sent += [(most, torch.int64)] if positions else []
    return [
        Call("all_gather", axis, elements, dtype) for elements, dtype in [(n, torch.int64), *(s for s in sent if s[0])]
    ]


def _capacity(routed: Tensor, factor: float, experts: int) -> Tensor:
    """On the device, so that nothing waits for it; float64 divides integers up to 2^53 exactly enough."""
    return torch.ceil(routed.double() * factor / experts).long()


def _within(indices: Tensor, slots: Tensor, counts: Tensor, before: Tensor, most: Tensor, experts: int) -> Tensor:
    """`indices` without the choices that come after `most` others for the same expert, `before` of them on ranks before."""
    place = torch.empty_like(slots).index_copy(0, slots, torch.arange(slots.shape[0], device=slots.device))
    starts = counts.cumsum(0) - counts
    flat = indices.flatten()
    expert = flat.clamp(0, experts - 1)
    over = place - starts[expert] + before[expert] >= most
    # An index that names no expert is left for the dispatch to refuse.
    return torch.where(over & (flat >= 0) & (flat < experts), -1, flat).view_as(indices)


def _kept(chosen: Tensor, order: Tensor, factor: float, experts: int) -> Tensor:
    """Boolean like `chosen` [T, k]: whether a slot stays when slots are served in `order`."""
    served = chosen.flatten()[order][:, None]
    slots, counts = sorted_slots(served, experts)
    most = _capacity(counts.sum(), factor, experts)
    stays = _within(served, slots, counts, torch.zeros_like(counts), most, experts).flatten() == served.flatten()
    return torch.empty_like(stays).index_copy(0, order, stays).view_as(chosen)
