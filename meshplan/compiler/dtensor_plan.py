"""What a plan means where everything runs as DTensors: mesh dims, parameter placements, inputs and declared boundaries.

The mesh has one dim for the data axes, flattened where the plan does not tell them apart, and one for every other axis.
Parameters are placed as the rules say; under an `fsdp` section each is sharded over all data ranks as well, along a
dim that divides evenly, and gathered at each use, whatever the strategy and the units. Parts of a fused parameter need
no care here: the program's sizes are global, so any placement computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from meshplan.compiler.bind import Bound, BoundParam, bind
from meshplan.compiler.compile import refuse_unlowered
from meshplan.compiler.examples import example_inputs
from meshplan.compiler.lowered import Core, ParamPlan, Program
from meshplan.errors import PlanError
from meshplan.mesh.build import expand
from meshplan.mesh.spec import DATA_AXES, MeshSpec
from meshplan.plan.placements import Placement, Replicate, Shard
from meshplan.plan.plan import Plan


@dataclass(frozen=True)
class DTensorPlan:
    """Placements by mesh dim.

    Attributes:
        core: bound plan, parameters (their `shards` name data axes too) and inputs; its program is empty.
        dims: the axes of more than one rank that each mesh dim flattens, outermost first.
        data: for each dim, whether it is one of data axes.
        params: by parameter name, the tensor dim sharded on each mesh dim, None where replicated.
        compute: the same while the parameter is used: data dims are gathered.
    """

    core: Core
    dims: tuple[tuple[str, ...], ...]
    data: tuple[bool, ...]
    params: Mapping[str, tuple[int | None, ...]]
    compute: Mapping[str, tuple[int | None, ...]]

    def input(self, key: str, ndim: int) -> tuple[int | None, ...]:
        """The dim of the model's input `key` that each mesh dim shards."""
        inputs = self.core.bound.inputs
        item = inputs.get(key) or inputs.get(key.partition(".")[0])
        layout = {one: place for axis, place in (item.place if item else {}).items() for one in expand((axis,))}
        return tuple(_dim(layout, axes, ndim) for axes in self.dims)

    def declared(self, path: str, side: str, key: str) -> dict[int, Placement]:
        """What a rule says of one boundary tensor, by mesh dim."""
        module = self.core.bound.modules.get(path)
        if module is None:
            return {}
        layout = module.declared(side, key)
        return {i: layout[axes[0]] for i, axes in enumerate(self.dims) if axes[0] in layout}


def dtensor_plan(model: nn.Module, plan: Plan, spec: MeshSpec, inputs: Any = None) -> DTensorPlan:
    """Bind `plan` for DTensor regions; nothing is traced. `inputs` as for `compile_core`.

    Raises PlanError: what `bind` raises, `axis-not-lowered`, `dtensor-option` for a plan that asks for mixed
    precision, compilation or gathering again, `no-inputs`.
    """
    refuse_unlowered(plan)
    if plan.experts is not None:
        raise PlanError(
            "the DTensor reference does not route experts", code="axis-not-lowered", where=plan.experts.where,
            legal="regions: auto",
        )  # fmt: skip
    _refuse_options(plan)
    bound = bind(plan, model, degrees=dict(spec.axes), given=tuple(inputs or ()))
    busy = [name for name, n in spec.axes if n > 1]
    data = tuple(a for a in busy if a in DATA_AXES)
    rest = [(a,) for a in busy if a not in DATA_AXES]
    dims = [data] if data and _together(bound, data) else [(a,) for a in data]
    ordered = tuple(sorted([*dims, *rest], key=lambda axes: busy.index(axes[0])))
    flags = tuple(axes[0] in DATA_AXES for axes in ordered)
    sharded = plan.fsdp is not None and plan.fsdp.strategy != "ddp"
    degrees = [spec.degree(*axes) for axes in ordered]
    stored = {p.name: _stored(p, ordered, flags, degrees, sharded) for p in bound.params.values()}
    compute = {n: tuple(None if d else s for s, d in zip(many, flags, strict=True)) for n, many in stored.items()}
    examples = example_inputs(model, bound, inputs, {a: spec.degree(a) for a in busy})
    program = Program(
        signature=tuple((name, example.key()) for name, example in examples.items()), boundaries=(), edits={},
        outputs=(), layouts=(), events=(), axes=tuple(busy), first_only=(), calls=frozenset(),
    )  # fmt: skip
    params = {p.name: _param(p, ordered, stored[p.name]) for p in bound.params.values()}
    return DTensorPlan(Core(bound, spec, params, program, examples), ordered, flags, stored, compute)


def _param(p: BoundParam, dims: tuple[tuple[str, ...], ...], stored: tuple[int | None, ...]) -> ParamPlan:
    shards = tuple((a, Shard(s)) for axes, s in zip(dims, stored, strict=True) if s is not None for a in axes)
    return ParamPlan(p.name, p.shape, str(p.dtype).removeprefix("torch."), p.requires_grad, shards, ())


def _refuse_options(plan: Plan) -> None:
    if plan.compile is not None:
        raise PlanError(
            "dtensor regions do not run under torch.compile", code="dtensor-option", where=plan.compile.where,
            legal="regions: auto, or no compile section",
        )  # fmt: skip
    if plan.recompute is not None and plan.recompute.gather == "regather":
        raise PlanError(
            "dtensor regions do not gather sequences again", code="dtensor-option",
            where=plan.recompute.source.child("gather").where, legal="regions: auto, or gather: save",
        )  # fmt: skip
    if plan.context is not None and plan.context.zigzags:
        raise PlanError(
            "dtensor regions know sequences in one run a rank, not in zigzag order", code="dtensor-option",
            where=plan.context.source.child("balance").where, legal="regions: auto, or balance: contiguous",
        )  # fmt: skip
    if plan.fsdp is not None:
        casts = [k for k in ("param_dtype", "reduce_dtype", "output_dtype") if getattr(plan.fsdp, k) is not None]
        if casts:
            raise PlanError(
                f"dtensor regions compute in the parameters' own dtype, not in fsdp.{casts[0]}", code="dtensor-option",
                where=plan.fsdp.source.child(casts[0]).where, legal="regions: auto, or an fsdp section without dtypes",
            )  # fmt: skip


def _together(bound: Bound, data: tuple[str, ...]) -> bool:
    """Whether every layout of the plan is the same on all data axes, so that they can be one mesh dim."""
    layouts = [{one: p for axis, p in item.place.items() for one in expand((axis,))} for item in bound.inputs.values()]
    layouts += [layout for m in bound.modules.values() for side in (m.input, m.output) for layout in side.values()]
    return all(len({str(layout.get(a, Replicate())) for a in data}) == 1 for layout in layouts)


def _dim(layout: Mapping[str, Placement], axes: tuple[str, ...], ndim: int) -> int | None:
    place = layout.get(axes[0])
    return place.dim % max(ndim, 1) if isinstance(place, Shard) else None


def _stored(
    p: BoundParam, dims: tuple[tuple[str, ...], ...], data: tuple[bool, ...], degrees: list[int], sharded: bool
) -> tuple[int | None, ...]:
    out = [_dim(p.placements, axes, len(p.shape)) if not d else None for axes, d in zip(dims, data, strict=True)]
    n = prod(degree for degree, d in zip(degrees, data, strict=True) if d)
    if sharded and n > 1:
        # Dims that no other axis splits, and that divide: uneven pieces of pieces are not worth their trouble here.
        free = [d for d, size in enumerate(p.shape) if d not in out and size % n == 0 and size]
        if free:
            out = [free[0] if d else s for s, d in zip(out, data, strict=True)]
    return tuple(out)
