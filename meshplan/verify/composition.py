"""The name of a composition: a plan on a number of ranks in a few words, such as `dp_shard 2 x tp 2 + sp`."""

from __future__ import annotations

from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan


def composition(plan: Plan, spec: MeshSpec) -> str:
    """Axes with more than one rank in mesh order, then what is combined with them.

    `sp` stands for activations sharded along the sequence (dim 1) over tp at some boundary; zero3 is not said.
    """
    axes = " x ".join(f"{name} {degree}" for name, degree in spec.axes if degree > 1) or "1 rank"
    extras = ["sp"] if spec.degree("tp") > 1 and _sequence_parallel(plan) else []
    if plan.fsdp is not None and plan.fsdp.strategy != "zero3":
        extras.append(plan.fsdp.strategy)
    if plan.context is not None and spec.degree("cp") > 1:
        extras.append(plan.context.title)
    if plan.experts is not None:
        extras.append(plan.experts.title)
    if plan.pipeline is not None and spec.degree("pp") > 1:
        extras.append(f"{plan.pipeline.schedule} {plan.pipeline.microbatches} microbatches")
    if plan.recompute is not None:
        extras.append("regather" if plan.recompute.policy == "none" else f"recompute {plan.recompute.policy}")
    if plan.regions != "auto":
        extras.append(f"regions {plan.regions}")
    return " + ".join([axes, *extras])


def _sequence_parallel(plan: Plan) -> bool:
    for rule in plan.rules:
        if rule.use == "sequence":
            return True
        for layout in (*rule.input.values(), *rule.output.values()):
            place = layout.get("tp")
            if isinstance(place, Shard) and place.dim == 1:
                return True
    return False
