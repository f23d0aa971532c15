"""`parallelize`: a single-device module and a plan become this rank's part of the program, ready to train."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan import compat
from meshplan.compiler.compile import PYTHON_ERRORS, compile_core
from meshplan.compiler.examples import OMITTED
from meshplan.compiler.frames import argument_keys
from meshplan.compiler.fsdp_cuts import (
    by_reduction,
    expert_axes,
    fsdp_cuts,
    fsdp_paths,
    kept_whole,
    reached_apart,
    sharded_by_fsdp,
    sharded_experts,
)
from meshplan.compiler.lowered import Core
from meshplan.compiler.lowered_graph import Lowered
from meshplan.compiler.source import raised_at, raised_by_us
from meshplan.errors import PlanError
from meshplan.lowering.agreement import agree_on, signature_check
from meshplan.lowering.compiled import compile_units, compiled_arounds, refuse_inner_recompute
from meshplan.lowering.fsdp import apply_fsdp
from meshplan.lowering.recompute import recompute_arounds
from meshplan.lowering.regions import parallelize_regions
from meshplan.lowering.tensor import bind_program, distribute_parameters
from meshplan.mesh.build import BuiltMesh, Groups, abstract_groups, build_groups
from meshplan.mesh.rankmap import log_rank_map
from meshplan.mesh.spec import DATA_AXES, MeshSpec
from meshplan.ops.dropout import DropoutStreams
from meshplan.plan.plan import Plan, as_regions
from meshplan.runtime.batch import remember
from meshplan.runtime.gradients import Gradients, Reduction, same
from meshplan.runtime.init import init_weights
from meshplan.runtime.meta import materialise
from meshplan.runtime.reach import require
from meshplan.runtime.session import Session, Signature
from meshplan.runtime.unchanged import Unchanged
from meshplan.runtime.windows import require_windows

log = logging.getLogger("meshplan")


def parallelize(
    model: nn.Module,
    plan: Plan,
    inputs: Any = None,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    regions: str | None = None,
    check: str = "values",
    init: bool = True,
) -> nn.Module:
    """Lower `model` onto the ranks of the default process group, in place, and return it.

    Arguments:
        model: an ordinary single-device module with equal parameters on every rank, or on the meta device (then it is
            materialised and initialised from `seed`).
        inputs: global example inputs (by name, or in order) that add to the plan's: tensors, `Input`s, constants.
        seed: of dropout, and of the initial values of a meta model; the same on any mesh.
        device: where a meta model is materialised; default: CUDA under a CUDA backend, else the CPU.
        regions: overrides the plan's `regions`: "auto", or "dtensor" for the slow reference (one rank alone runs the
            model as it is).
        check: "values" runs every distinct use of a sharding rule with small numbers, one device against all ranks of
            its axis, and refuses what does not hold (`rule-refuted`); "off" trusts the rules.
        init: False leaves the parameters of a meta model NaN, for a load that follows.

    Without a process group the world is this one process.

    Raises PlanError on every rank before the first collective: what `meshplan.lower` raises, `optimizer-built` where an
    optimizer already holds the parameters, `ranks-differ`, `rank-failed`, `rank-missing`.
    """
    real = dist.is_available() and dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if real else (1, 0)
    if as_regions(regions or plan.regions) == "dtensor" and world > 1:
        return parallelize_regions(
            model,
            plan,
            inputs,
            seed=seed,
            device=device,
            device_type=_device_type(real),
            check=lambda: _refuse_used(model),
            init=init,
        )
    failed: PlanError | None = None
    lowered: Lowered | None = None
    try:
        _refuse_twice(model)
        spec = MeshSpec.resolve(plan.mesh, world)
        core = compile_core(model, plan, spec, inputs, rank, check=check)
        refuse_inner_recompute(core.bound)
        lowered = Lowered(model, core, rank)
        _refuse_optimizers(model)
    except PlanError as error:
        failed = error
    if real and dist.get_backend() != "fake":
        agree_on(lowered, failed, "program", model)
    if failed is not None or lowered is None:
        raise failed or AssertionError("no program and no error")
    core, spec = lowered.core, lowered.core.spec
    device_type = _device_type(real)
    groups: Groups = build_groups(spec, device_type, _axes_sets(core)) if real else abstract_groups(spec, rank)
    if plan.context is not None and plan.context.transport == "peer" and (cp := groups.group("cp")).name is not None:
        require(
            cp.name, cp.axis, device_type, asks="context.transport is peer", code="peers-out-of-reach",
            legal="transport: send, or cp inside one node of GPUs that NVLink connects",
        )  # fmt: skip
    if core.experts is not None and core.experts.section.dispatch == "fused":
        require_windows(groups.group(*core.experts.view.axes("ep")), device_type)
    log_rank_map(spec, rank, view=core.experts.view if core.experts else None)
    tensor_axes = tuple(name for name, n in spec.axes if n > 1 and spec.parent(name) not in DATA_AXES and name != "pp")
    meta = any(p.is_meta for p in model.parameters())
    if isinstance(groups, BuiltMesh):
        distribute_parameters(model, core, groups, tensor_axes)
    streams = DropoutStreams(seed)
    arounds = recompute_arounds(core.bound, streams)
    session = _session(model, core, groups, streams, lowered, inputs, world, rank, real)
    if "" in arounds:
        inner = arounds[""]
        arounds[""] = lambda run, args, kwargs: session.around(lambda *a, **k: inner(run, a, k), args, kwargs)
    else:
        arounds[""] = session.around
    arounds = compiled_arounds(core.bound, arounds)

    def install(new: Core) -> None:
        bind_program(model, new, groups, streams, arounds, bool(tensor_axes))
        reduce_as(new)

    def reduce_as(new: Core) -> None:
        found = [r for r in reductions(params, new, groups) if r.params]
        if not same(found, session.gradients.reductions):
            session.gradients.reductions = found

    session.install = install
    bind_program(model, core, groups, streams, arounds, bool(tensor_axes))
    model.__dict__["_meshplan_session"] = session
    remember(session)
    _apply_data(model, core, groups)
    if meta:
        materialise(model, device or device_type, loading=not init)
        if init:
            init_weights(model, seed)
    # Under FSDP the modules show gathered parameters now and then; gradients arrive at these.
    params = dict(model.named_parameters())
    reduce_as(core)
    compile_units(model, core.bound, arounds)
    reduced = [p for r in session.gradients.reductions for p in r.params]
    if sharded_by_fsdp(core):
        session.gradients.others = model.parameters
    session.unchanged = Unchanged(model, reduced, swapped=sharded_by_fsdp(core))
    return model


def _refuse_twice(model: nn.Module) -> None:
    if "_meshplan_session" in model.__dict__:
        raise PlanError("this model is parallelised already", code="already-parallelized", legal="a fresh model")


def _refuse_used(model: nn.Module) -> None:
    _refuse_twice(model)
    _refuse_optimizers(model)


def _refuse_optimizers(model: nn.Module) -> None:
    """An optimizer built before would step tensors that the model no longer uses."""
    import gc

    mine = {id(p) for p in model.parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):  # isinstance would wake torch's deprecated proxies
            held = [p for g in found.param_groups for p in g["params"] if id(p) in mine]
            if held:
                raise PlanError(
                    f"an optimizer ({type(found).__name__}) already holds {len(held)} of this model's parameters; after lowering "
                    "it would update tensors that the model no longer uses", code="optimizer-built",
                    legal="build the optimizer after parallelize, from model.parameters()",
                )  # fmt: skip


def _device_type(real: bool) -> str:
    return "cuda" if real and "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu"


_GROUPS = ("rows", "classes", "tokens", "normed", "ep", "nodes", "node", "copies", "etp", "split")
"""Settings of operators that name axes."""


def _axes_sets(core: Core) -> list[tuple[str, ...]]:
    """Every set of axes whose flattened group the run will ask for."""
    sets: list[tuple[str, ...]] = [("dp_replicate", "dp_shard", "cp"), ("dp_shard", "cp"), ("cp",), ("tp",)]
    for edits in core.program.edits.values():
        for edit in edits.values():
            if edit.replacement:
                sets += [v for k, v in edit.replacement.settings if k in _GROUPS and len(v) > 1]
    sets += [axes for axes in (expert_axes(core), *(how.data for how in by_reduction(core))) if len(axes) > 1]
    return list(dict.fromkeys(sets))


def _apply_data(model: nn.Module, core: Core, groups: Groups) -> None:
    section, spec = core.bound.plan.fsdp, core.spec
    if section is None or not sharded_by_fsdp(core) or not isinstance(groups, BuiltMesh):
        return
    shard: Any = ("dp_shard", "cp")
    mesh = groups.mesh_of("dp_replicate", shard) if spec.degree("dp_replicate") > 1 else groups.mesh_of(shard)
    by_param = {id(p): name for name, p in model.named_parameters()}
    cuts = fsdp_cuts(core)
    apply_fsdp(
        model, list(fsdp_paths(core)), mesh, strategy=section.strategy, param_dtype=section.param_dtype,
        reduce_dtype=section.reduce_dtype, output_dtype=section.output_dtype,
        reshard_after_forward=section.reshard_after_forward,
        shard_dim_of=lambda p: cuts[by_param[id(p)]], whole=kept_whole(core),
        lifted=frozenset(name for name, p in core.params.items() if not p.routed),
        experts=_experts_mesh(core, groups), divisor=spec.degree(*DATA_AXES),
    )  # fmt: skip


def _experts_mesh(core: Core, groups: BuiltMesh) -> dict[str, DeviceMesh]:
    """By experts module, the mesh that FSDP shards it over."""
    own = sharded_experts(core)
    if not own:
        return {}
    axes = expert_axes(core)
    mesh = groups.mesh_of("dp_replicate", axes) if core.spec.degree("dp_replicate") > 1 else groups.mesh_of(axes)
    return dict.fromkeys(own, mesh)


def reductions(params: Mapping[str, nn.Parameter], core: Core, groups: Groups) -> list[Reduction]:
    """Which parameters' gradients are reduced after backward, grouped by the axes they are partial on."""
    out = []
    for how, many in by_reduction(core).items():
        # An expert without copies still is a mean over the data ranks: a group of one.
        data = groups.group(*how.data) if how.data else groups.alone() if how.divisor > 1 else None
        sums = tuple(groups.group(a) for a in how.sums)
        apart = tuple(params[p.name] for p in reached_apart(core, many))
        out.append(Reduction(tuple(params[p.name] for p in many), sums, data, how.divisor, apart))
    return out


def _session(
    model: nn.Module, core: Core, groups: Groups, streams: DropoutStreams, lowered: Lowered, inputs: Any, world: int, rank: int,
    real: bool,
) -> Session:  # fmt: skip
    plan = core.bound.plan
    pristine = lowered.pristine

    def relower(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Core:
        given = global_examples(model, args, kwargs, core)
        modes = [(mine, theirs.training) for mine, theirs in zip(pristine.modules(), model.modules(), strict=True)]
        if _shapes(given) == _said(dict(core.program.signature)) and all(m.training == mode for m, mode in modes):
            return core
        for mine, mode in modes:
            mine.training = mode
        heads = {name.partition(".")[0] for name in core.bound.inputs}
        # From the plan's own mesh: few heads make the program's another one.
        try:
            new = compile_core(
                pristine, plan, MeshSpec.resolve(plan.mesh, world), {**dict.fromkeys(heads, OMITTED), **given}, rank,
                check=core.program.checked.how,
            )  # fmt: skip
        except PYTHON_ERRORS as error:
            if raised_by_us(error):
                raise
            raise misfit(given, core, error) from error
        _refuse_moved(core, new)
        return new

    agree = signature_check(world, rank) if real and dist.get_backend() != "fake" else (lambda signature: None)
    return Session(model, core, groups, Gradients([]), streams, relower, lambda c: None, agree, lowered)


def misfit(given: Mapping[str, Any], core: Core, cause: BaseException) -> PlanError:
    """The single-device model fails on what this call's inputs are parts of, as far as the plan says."""
    placed = {name.partition(".")[0] for name in core.bound.inputs}
    shapes = {name: [list(x.shape) for x in compat.flatten(v)[0] if isinstance(x, Tensor)] for name, v in given.items()}
    said = ", ".join(f"{name} {sizes[0]}" for name, sizes in shapes.items() if sizes)
    whole = [name for name, sizes in shapes.items() if sizes and name not in placed]
    hint = f"; the plan does not place {', '.join(whole)}, taken for whole on every rank" if whole else ""
    return PlanError(
        f"the single-device model fails on the global inputs that this call stands for ({said}{hint}): {cause}",
        code="inputs-misfit", where=raised_at(cause), module="",
        legal="each rank's part of the inputs that the plan places (mp.shard_batch), and an entry in its inputs for every other "
        "that is split",
    )  # fmt: skip


def _refuse_moved(old: Core, new: Core) -> None:
    """Parameters lie where the first program put them."""
    for name, p in new.params.items():
        if p.shards != old.params[name].shards or new.spec.axes != old.spec.axes:
            raise PlanError(
                f"these inputs want {name} laid out as {p.shards}, and the first call's had it as {old.params[name].shards}",
                code="other-branch", module=name.rpartition(".")[0], legal="inputs that use the same heads as the first",
            )  # fmt: skip


def _shapes(given: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for name, value in given.items():
        leaves = compat.flatten(value)[0]
        out[name] = tuple(
            (tuple(x.shape), str(x.dtype), x.requires_grad) if isinstance(x, Tensor) else repr(x) for x in leaves
        )
    return _said(out)


def _said(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Without arguments that are None: they might as well not have been given."""
    return {name: leaves for name, leaves in shapes.items() if leaves != (repr(None),)}


def global_examples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], core: Core) -> dict[str, Any]:
    """Global inputs (on meta) of which these local arguments are one rank's part, as the plan places them."""
    from meshplan.mesh.build import expand

    leaves, structure = compat.flatten((args, kwargs))
    keys = argument_keys(model, args, kwargs)
    placed = core.bound.inputs
    grown = []
    for key, x in zip(keys, leaves, strict=True):
        item = placed.get(key) or placed.get(key.partition(".")[0])
        if not isinstance(x, Tensor):
            grown.append(x)
            continue
        shape = list(x.shape)
        for axis, placement in (item.place if item else {}).items():
            if hasattr(placement, "dim"):
                for one in expand((axis,)):
                    shape[placement.dim % len(shape)] *= core.spec.degree(one)
        grown.append(torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad))
    many, named = compat.unflatten(grown, structure)
    from meshplan.compiler.frames import positional_names

    names = positional_names(model)
    return {**{names[i]: v for i, v in enumerate(many)}, **named}
