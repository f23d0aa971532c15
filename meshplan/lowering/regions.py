"""`parallelize` and `lower` of `regions: dtensor`: bound, rehearsed on fake tensors, and put onto the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from meshplan.compiler.dtensor_lowered import DTensorLowered
from meshplan.compiler.dtensor_plan import DTensorPlan, dtensor_plan
from meshplan.errors import PlanError
from meshplan.lowering.agreement import agree_on, signature_check
from meshplan.lowering.dtensor import install_regions
from meshplan.lowering.rehearsal import rehearse, stand_in_world
from meshplan.mesh.build import build_groups
from meshplan.mesh.rankmap import log_rank_map
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.dropout import DropoutStreams
from meshplan.plan.plan import Plan
from meshplan.runtime.batch import remember
from meshplan.runtime.gradients import Gradients
from meshplan.runtime.init import init_weights
from meshplan.runtime.meta import materialise
from meshplan.runtime.session import Session

log = logging.getLogger("meshplan")


def parallelize_regions(
    model: nn.Module, plan: Plan, inputs: Any, *, seed: int, device: Any, device_type: str, check: Callable[[], None],
    init: bool = True,
) -> nn.Module:  # fmt: skip
    """`parallelize` with DTensor regions, on a default process group of more than one rank. `check` raises what
    `parallelize` refuses of a model."""
    world, rank = dist.get_world_size(), dist.get_rank()
    real = dist.get_backend() != "fake"
    plan = replace(plan, regions="dtensor")

    def bound() -> DTensorLowered:
        check()
        made = dtensor_plan(model, plan, MeshSpec.resolve(plan.mesh, world), inputs)
        return DTensorLowered(model, made, None, rank)

    low = _agreed(bound, "program", real, model)
    spec = low.core.spec
    built = build_groups(spec, device_type, _axes_sets(low.dtensor))
    log_rank_map(spec, rank)
    made = low.dtensor
    low = _agreed(lambda: DTensorLowered(model, made, rehearse(model, made, built), rank), "rehearsal", real)
    meta = any(p.is_meta for p in model.parameters())
    streams = DropoutStreams(seed)
    same = signature_check(world, rank) if real else (lambda signature: None)
    # Sizes are global and layouts DTensor's own, so one program serves every input signature.
    relower, install = (lambda signature, args, kwargs: made.core), (lambda core: None)
    session = Session(model, made.core, built, Gradients([]), streams, relower, install, same, low)
    install_regions(model, made, built.mesh_of(*made.dims), streams, session.around)
    model.__dict__["_meshplan_session"] = session
    remember(session)
    if meta:
        materialise(model, device or device_type, loading=not init)
        if init:
            init_weights(model, seed)
    return model


def lower_regions(model: nn.Module, plan: Plan, world_size: int, inputs: Any, rank: int) -> DTensorLowered:
    """`lower` with DTensor regions. Collectives are predicted where no process group is in the way of a stand-in."""
    spec = MeshSpec.resolve(plan.mesh, world_size)
    made = dtensor_plan(model, replace(plan, regions="dtensor"), spec, inputs)
    recorded = None
    with stand_in_world(spec, rank, _axes_sets(made)) as built:
        if built is not None and made.dims:
            recorded = rehearse(model, made, built)
    return DTensorLowered(model, made, recorded if made.dims else (), rank, keep=False)


def _agreed(make: Callable[[], DTensorLowered], tag: str, real: bool, model: nn.Module | None = None) -> DTensorLowered:
    """What `make` gives on every rank, or the error of the one that failed on all of them."""
    failed: PlanError | None = None
    low: DTensorLowered | None = None
    try:
        low = make()
    except PlanError as error:
        failed = error
    if real:
        agree_on(low, failed, tag, model)
    if low is None:
        raise failed or AssertionError("no program and no error")
    return low


def _axes_sets(plan: DTensorPlan) -> list[tuple[str, ...]]:
    own = [axes for axes in plan.dims if len(axes) > 1]
    return [("dp_replicate", "dp_shard", "cp"), ("dp_shard", "cp"), ("tp",), *own]
