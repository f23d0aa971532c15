"""`lower`: what a plan makes of a model, without ranks; the program of local tensors, or of DTensor regions."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshplan.compiler import lowered_graph
from meshplan.compiler.lowered_graph import Lowered
from meshplan.lowering.regions import lower_regions
from meshplan.plan.plan import Plan, as_regions


def lower(
    model: nn.Module,
    plan: Plan,
    world_size: int,
    inputs: Any = None,
    *,
    rank: int = 0,
    regions: str | None = None,
    check: str = "values",
) -> Lowered:
    """Lower `plan` for `world_size` ranks: anywhere, without a process group or a GPU.

    `model` may be on meta and is not changed.

    Arguments:
        inputs: global example inputs that add to the plan's, by name or in order.
        rank: whose program to derive.
        regions: overrides the plan's `regions`. Collectives of "dtensor" regions are predicted only where this process
            has no process group of its own (`Lowered.predicted`).
        check: "values" runs every distinct use of a sharding rule with small numbers, one device against all ranks of
            its axis, and refuses what does not hold (`rule-refuted`); "off" trusts the rules.

    Raises PlanError with the user's line; see `meshplan.compiler.compile.compile_core` and
    `meshplan.compiler.dtensor_plan.dtensor_plan`.
    """
    if as_regions(regions or plan.regions) == "dtensor":
        return lower_regions(model, plan, world_size, inputs, rank)
    return lowered_graph.lower(model, plan, world_size, inputs, rank=rank, check=check)
