"""Routed experts whose experts are split over ranks: the semantic op, on this rank's tokens and this rank's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts.allgather import allgather_experts
from meshplan.ops.experts.alltoall import alltoall_experts
from meshplan.ops.experts.contract import Body, Job, Routing, check
from meshplan.ops.experts.fused import through_windows
from meshplan.ops.experts.layout import TokenLayout
from meshplan.ops.experts.payload import check_payload
from meshplan.ops.experts.twolevel import Levels, twolevel_experts
from meshplan.runtime.comm import AxisGroup

DISPATCHES = ("alltoall", "allgather", "twolevel", "fused")
WORTH = 0.9
"""A token travels once per rank where that is at most this part of once per expert: indices and weights go along then."""


def dispatch_of(name: str, ranks: int, k: int) -> dict[str, Any]:
    """The arguments of `routed_experts` for a plan's `dispatch`, `auto` by the rows that are expected to travel.

    Raises PlanError `bad-value` for one that cannot run here.
    """
    once = ranks * (1 - (1 - 1 / ranks) ** k) <= WORTH * k  # rows a token, of k (see alltoall.py)
    if name in ("auto", "alltoall") or ranks == 1:
        return {"dispatch": "alltoall", "dedup": name == "auto" and once}
    return {"dispatch": name, "dedup": once} if name == "twolevel" else {"dispatch": name}


def routed_experts(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    body: Body,
    *,
    experts: int,
    group: AxisGroup,
    dispatch: str = "alltoall",
    dedup: bool = False,
    equal: bool = False,
    layout: TokenLayout | None = None,
    levels: Levels | None = None,
    payload: str | None = None,
    meanwhile: Callable[[], object] | None = None,
    window: Any = None,
    observe: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """out[t] = sum over j of weights[t, j] expert_(indices[t, j])(tokens[t]), experts anywhere in `group`.

    Rank r of the group holds experts r E/n to (r + 1) E/n - 1. Every token is computed (`capacity.py` drops some first, where a
    model does). All ranks issue the same collectives for any routing; ranks may have unequal numbers of tokens, or none.

    Gradients of `tokens` and `weights` are those of this rank's loss and all others'; an expert's gradient is the *sum* over
    all tokens that it saw of whichever rank. Where ranks' losses are averaged, the lowering divides it by the number of data
    ranks (not by that of the expert's copies: it would be `ep` times too large).

    Arguments:
        tokens: [T, H]; indices: integers [T, k], negative for a choice that no expert takes; weights: [T, k].
        body: this rank's experts on sorted rows, see `Body`.
        experts: how many there are on all ranks.
        group: the ranks that share one copy of them.
        dispatch: `alltoall` (any size), `allgather` (small groups: the bytes do not depend on the routing), `twolevel` (several
            nodes: a token crosses to each once) or `fused` (GPUs of one node, through each other's memory: a token travels once
            per rank; without `payload` and `meanwhile`).
        dedup: a token travels once per rank and not once per expert; with `twolevel`, inside a node.
        equal: for `allgather`: all ranks have as many tokens.
        layout: where other ranks hold the same tokens, or parts of the same experts (`body` then returns summands). `group` is
            then the ranks that share the experts' copy at this rank's place in these.
        levels: for `twolevel`: the ranks at this one's place in every node, and the ranks of its node (see `twolevel.py`).
        payload: `fp8` sends dispatched rows in 8 bits (see `payload.py`); results, and gradients, stay as they are.
        meanwhile: called once while dispatched rows are under way; what it computes has its backward while their gradients are.
            It may use collectives, the same ones on all ranks. See `with_shared`.
        window: for `fused`: that memory, from `meshplan.kernels.experts.window.open_window`, or a function of what is sent that
            gives it.
        observe: told the indices of the tokens that this rank dispatches, which `layout` may have made fewer or more.

    Returns:
        [T, H] in the dtype of `tokens`.

    Raises:
        PlanError: `experts-shape`, `experts-split`, `experts-levels`, `expert-index`, `bad-value`; for `fused` also
            `experts-fused`, `experts-overflow`, `experts-kernel`.
    """
    given = Routing(tokens, indices, weights)
    check(given, experts, group)
    check_payload(payload)
    if dispatch not in DISPATCHES:
        raise PlanError(f"experts have no dispatch {dispatch!r}", code="bad-value", legal=list(DISPATCHES))
    if (levels is None) == (dispatch == "twolevel"):
        raise PlanError(
            f"dispatch {dispatch!r} " + ("needs levels" if levels is None else "has no levels"),
            code="bad-value",
            legal="levels=(outer, inner) with dispatch 'twolevel', and none with others",
        )

    job = Job(body, experts, group, payload, meanwhile)

    def send(x: Routing) -> Tensor:
        if observe is not None:
            observe(x.indices)
        if levels is not None:
            return twolevel_experts(x, job, levels, dedup)
        if dispatch == "fused":
            return through_windows(x, job, window)
        if dispatch == "allgather":
            return allgather_experts(x, job, equal)
        return alltoall_experts(x, job, dedup)

    return (layout or TokenLayout()).around(given, send)


def with_shared(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    body: Body,
    shared: Callable[[Tensor], Tensor],
    **options: Any,
) -> Tensor:
    """`routed_experts` and `shared(tokens)` [T, H], what experts that every token goes to make of it, added. They compute while
    tokens are under way to the others, and their gradients while those of tokens come back.

    Arguments:
        options: of `routed_experts`, without `meanwhile`; others as there.
    """
    made: list[Tensor] = []
    out = routed_experts(tokens, indices, weights, body, meanwhile=lambda: made.append(shared(tokens)), **options)
    return out + made[0]
