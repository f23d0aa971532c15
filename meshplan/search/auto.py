"""`auto_plan`: from one run of the unmodified model on fake tensors to a plan with the placements that cost least."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from meshplan import compat
from meshplan.compiler.examples import by_name
from meshplan.compiler.skeleton import fake_world
from meshplan.cost.machine import Machine
from meshplan.lowering.lower import lower
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Placement, Shard
from meshplan.plan.plan import Plan
from meshplan.plan.rules import Input, Rule
from meshplan.plan.source import user_source
from meshplan.search.attempts import Attempt, Search
from meshplan.search.axis import Limits
from meshplan.search.batch import batch_inputs
from meshplan.search.context import over_context, sequence_inputs
from meshplan.search.experts import experts_section
from meshplan.search.report import header, kept_whole
from meshplan.search.trace import Traced, traced
from meshplan.search.units import units_of

UPDATE = 14.0
"""Bytes an AdamW step moves for each byte of a bf16 parameter: itself, its gradient, two float32 moments, most of them twice."""
GAP = 1e-3
"""Relative gap to the proved bound at which the solver may stop."""


def auto_plan(model: nn.Module, mesh: Mapping[str, int], inputs: Any, **options: Any) -> Plan:
    """Derive a plan for `model` on `mesh`: placements that minimise modelled time under a bound on parameter bytes.

    Arguments:
        model: unchanged; may be on meta.
        mesh: degree by axis, outermost first; -1 on one axis needs `world_size`.
        inputs: global example inputs by argument name (or in order): tensors, on meta or fake too, and Python constants.
        options: any of the following, by name, with the defaults of `derive`.
        memory: parameter bytes (model's dtype, gradients and optimizer not counted) that a rank may hold on tp, before FSDP cuts
            further. None: 5 % more of what is split than any exact plan of this mesh must hold.
        sequence: True cuts activations between the split modules along a dim that is not the batch wherever that moves no more
            bytes (SP); False never does; None does where it pays in modelled time, and so does True where it cannot be lowered.
        outputs: layouts in which the model's outputs may be left, such as `{"logits": {"tp": S(-1)}}`; others end whole on tp.
        fsdp: keys of the plan's `fsdp` section; by default zero3 over the repeated blocks where dp_shard has ranks.
        context: keys of the plan's `context` section where cp has ranks; by default a ring in zigzag order through every
            `scaled_dot_product_attention` of the sequence. Inputs with the sequence as dim 1 are split there.
        experts: keys of the plan's `experts` section, with every module that takes (tokens, indices, weights) for `at` where that
            is left out. By default experts are parameters like any others.
        machine: whose links and rates the model takes; an H100 node by default.
        seconds: how long the solver may look for a better solution than the one it has.

    The plan's `note` and its rules' notes say what was gained, with the proved bound. Raises PlanError: `no-placement` if nothing
    satisfies the bounds, `axis-not-lowered`, and what `lower` raises for the model on any plan (`host-read`, `random-op`, ...).
    """
    return derive(model, mesh, inputs, **options).plan


def derive(
    model: nn.Module,
    mesh: Mapping[str, int],
    inputs: Any,
    *,
    memory: float | None = None,
    sequence: bool | None = None,
    outputs: Mapping[str, Mapping[str, Placement]] | None = None,
    fsdp: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    context: Mapping[str, Any] | None = None,
    experts: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    seconds: float = 5.0,
) -> Attempt:
    """As `auto_plan`, which explains the arguments, with what the plan was written from and what it lowers to."""
    given = by_name(model, inputs)
    machine = machine or Machine()
    bare = Plan(mesh=dict(mesh), experts=experts_section(model, experts), source=user_source())
    spec = MeshSpec.resolve(bare.mesh, world_size or math.prod(bare.mesh.values()))
    with fake_world() as mode:
        program = traced(model, bare, given, mode, spec)
        batched = batch_inputs(program.inputs)
        base = replace(
            bare,
            inputs=_placed(program, batched, given, spec),
            fsdp=_fsdp(model, program, spec, fsdp),
            rules=_left(outputs),
        )
        base, lowered = over_context(base, model, program, given, spec, context)
        if spec.degree("tp") == 1:
            return Attempt(base, lowered or lower(model, base, spec.world_size, given), None)
        with mode, compat.on_cpu():
            search = Search(model, base, given, spec, program, batched, machine)
            limits = Limits(sequence=sequence, bytes=memory, seconds_per_byte=_upkeep(spec, machine))
    found = search.run(limits, seconds, GAP)
    found = replace(found, whole=kept_whole(program.program, found.choice) if found.choice else [])
    return replace(found, plan=replace(found.plan, note=header(found, spec)))


def _upkeep(spec: MeshSpec, machine: Machine) -> float:
    """Modelled seconds a step for one parameter byte on a rank: FSDP gathers it twice and scatters its gradient, replicas
    all-reduce what is left, and the optimizer reads and writes it, its gradient and two moments in float32 beside bf16."""
    shards, copies = spec.degree("dp_shard"), spec.degree("dp_replicate")
    seconds = UPDATE / shards / machine.memory
    if shards > 1:
        seconds += 3 * (shards - 1) / shards / machine.link(spec, "dp_shard").rate
    if copies > 1:
        seconds += 2 * (copies - 1) / copies / shards / machine.link(spec, "dp_replicate").rate
    return seconds


def _placed(
    program: Traced, batched: Collection[str], given: Mapping[str, Any], spec: MeshSpec
) -> dict[str, Input]:  # fmt: skip
    data = spec.degree("dp") > 1
    split = sequence_inputs(program.inputs, spec)
    out = {}
    for key, t in program.inputs.items():
        place: dict[str, Any] = {"dp": Shard(0)} if data and key in batched else {}
        place |= {"cp": Shard(1)} if key in split else {}
        shape = tuple(t.shape) if "." not in key and key in given else None
        if shape is not None or place:
            out[key] = Input(shape=shape, dtype=t.dtype if shape is not None else None, place=place)
    return out


def _fsdp(model: nn.Module, program: Traced, spec: MeshSpec, given: Mapping[str, Any] | None) -> Any:
    if given is not None:
        return dict(given)
    if spec.degree("dp_shard") == 1:
        return None
    entered = {path for path, _ in program.program.trace.entered}
    return {"units": units_of(model, entered) or [""], "strategy": "zero3"}


def _left(outputs: Mapping[str, Mapping[str, Placement]] | None) -> tuple[Rule, ...]:
    if not outputs:
        return ()
    return (
        Rule("", output={key: dict(layout) for key, layout in outputs.items()}, note="the model's outputs stay split"),
    )
