"""Puts a program onto the user's modules: parameters become DTensors seen as local tensors, boundaries and edits are bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshplan.compiler.beside import Beside
from meshplan.compiler.edits import Edit
from meshplan.compiler.few_heads import sub_axes
from meshplan.compiler.frames import positional_names
from meshplan.compiler.fsdp_cuts import kept_whole
from meshplan.compiler.lowered import Boundary, Core, ParamPlan, Program
from meshplan.compiler.sites import Move
from meshplan.mesh.build import BuiltMesh, Groups
from meshplan.ops.dropout import DropoutStreams
from meshplan.ops.experts.call import routed_of
from meshplan.plan.placements import Partial
from meshplan.runtime import replace
from meshplan.runtime.beside import EarlyRuns, stand_aside
from meshplan.runtime.boundary import BoundMove
from meshplan.runtime.comm import chunk_offset, chunk_sizes
from meshplan.runtime.editing import BoundEdit, Editing, FlexEditing, unedited_flex
from meshplan.runtime.fused import fused_shard
from meshplan.runtime.module import Around, Convert, Duties, install
from meshplan.runtime.regather import gathering_again, keeping_shards


def distribute_parameters(model: nn.Module, core: Core, built: BuiltMesh, axes: tuple[str, ...]) -> None:
    """Replace every parameter by a DTensor over `axes` (the tensor-parallel axes) that holds this rank's shard.

    All parameters are lifted onto the one mesh, replicated where the plan says nothing, so that optimizers and clipping
    meet one mesh. Ties survive; nothing is communicated: every rank cuts its own full copy (or meta tensor).
    """
    routed = core.experts.view.axes("ep") if core.experts else ()
    if not axes and not routed:
        return
    made: dict[int, nn.Parameter] = {}
    meshes = {own: built.mesh_of(*own) for own in (_lying_on(built, axes, ()), _lying_on(built, axes, routed)) if own}
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in made:
                plan = core.params[names[id(p)]]
                own = _lying_on(built, axes, routed if plan.routed else ())
                made[id(p)] = _distributed(p, plan, built, own, meshes[own]) if own else p
            module._parameters[name] = made[id(p)]


def _lying_on(built: BuiltMesh, axes: tuple[str, ...], routed: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a parameter's DTensor, in mesh order: those of all, and those that experts are spread over."""
    return tuple(a for a in built.spec.names if a in axes or a in routed)


def _distributed(p: nn.Parameter, plan: ParamPlan, built: BuiltMesh, axes: tuple[str, ...], mesh: Any) -> nn.Parameter:
    shards, spec = dict(plan.shards), built.spec
    local: Tensor = p.detach()
    placements: list[Any] = []
    for axis in axes:
        parent = spec.parent(axis)
        shard = shards.get(axis, shards.get(parent))
        if shard is None or (shard.copies > 1 and axis == sub_axes(parent)[1]):
            placements.append(Replicate())
            continue
        # Sub-axes in turn, outermost first, cut as the axis they are of does at once (few_heads.py sees to it).
        group = built.group(axis)
        if shard.parts:
            local = torch.cat(
                [_cut(piece, shard.dim, group) for piece in local.split(list(shard.parts), shard.dim)], shard.dim
            )
            placements.append(fused_shard(shard.dim, shard.parts))
        else:
            local = _cut(local, shard.dim, group)
            placements.append(Shard(shard.dim))
    spread = DTensor.from_local(
        local.contiguous().clone() if not local.is_meta else local.contiguous(),
        mesh, placements, run_check=False, shape=p.shape, stride=p.contiguous().stride() if p.is_meta else p.stride(),
    )  # fmt: skip
    new = nn.Parameter(spread, requires_grad=p.requires_grad)
    for key, value in p.__dict__.items():
        setattr(new, key, value)
    return new


def _cut(x: Tensor, dim: int, group: Any) -> Tensor:
    size = x.shape[dim]
    return x.narrow(dim, chunk_offset(size, group.size, group.rank), chunk_sizes(size, group.size)[group.rank])


def bind_program(
    model: nn.Module, core: Core, groups: Groups, streams: DropoutStreams, arounds: Mapping[str, Around], dtensor: bool
) -> None:
    """Install the program's boundaries, parameter views and edits on the modules of `model`; may be called again with
    another program of the same model."""
    program = core.program
    modules = dict(model.named_modules())
    canonical = {full: p.name for p in core.bound.params.values() for full in p.names}
    inputs: dict[str, dict[str, list[Convert]]] = {}
    outputs: dict[str, dict[str, list[Convert]]] = {}
    views: dict[tuple[str, str], list[Any]] = {}
    for b in program.boundaries:
        side, path, key = b.site.side, b.site.module, b.site.key
        if side == "input":
            inputs.setdefault(path, {}).setdefault(key, []).append(_converter(b, groups))
        elif side == "output":
            outputs.setdefault(path, {}).setdefault(key, []).append(_converter(b, groups))
        elif side == "param":
            views.setdefault((path, key), []).append(_mover(b.move, groups))
    for path, name, axis in program.first_only:
        views.setdefault((path, name), []).append(BoundMove("R", "I", groups.group(axis)))
    if core.experts is not None:
        for name, found in core.experts.packed.items():
            if core.params[name].routed and isinstance(found.inner_of(name), Partial):
                etp = groups.group(*core.experts.view.axes("etp"))
                views.setdefault((found.path, name), []).append(BoundMove("R", "P", etp))
        for module in modules.values():
            stand_aside(module)
        core.experts.put(model)
        _run_early(program.beside, modules)
    again = {b.site.module for b in program.boundaries if b.regather}
    callers = set(program.edits)
    sleepers = {callee for caller, callee in program.calls if caller in callers}
    for path, module in modules.items():
        edits = {
            n: _bound(e, path, groups, streams, program.boundaries) for n, e in program.edits.get(path, {}).items()
        }
        ins = {k: _chain(v) for k, v in inputs.get(path, {}).items()}
        outs = {k: _chain(v) for k, v in outputs.get(path, {}).items()}
        around = arounds.get(path)
        if path in again:
            around = keeping_shards(around)
        duties = None
        flexed = path in program.flex
        if ins or outs or edits or around or flexed or "_meshplan_duties" in module.__dict__:
            positions = {name: i for i, name in enumerate(positional_names(module))}
            duties = Duties(
                path, ins, outs, positions, edits if edits or flexed else None, around, () if path else program.asked,
                editing=_editing(program, edits), always=not path,
            )  # fmt: skip
        install(module, duties, _views_of(module, path, views, core, canonical, dtensor), path in sleepers)


def _run_early(found: Sequence[Beside], modules: dict[str, nn.Module]) -> None:
    """Let what stands beside experts compute while their tokens are under way."""
    for module in modules.values():
        if (routed := routed_of(module)) is not None:
            routed.early = None
    for experts in dict.fromkeys(b.experts for b in found):
        routed = routed_of(modules[experts])
        assert routed is not None
        routed.early = EarlyRuns([b for b in found if b.experts == experts], modules)


def _editing(program: Program, edits: Mapping[int, BoundEdit]) -> Callable[..., Any]:
    if not program.flex:
        return Editing
    return FlexEditing if edits else unedited_flex


def _views_of(
    module: nn.Module,
    path: str,
    moves: dict[tuple[str, str], list[Any]],
    core: Core,
    canonical: Mapping[str, str],
    dtensor: bool,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    section, whole = core.bound.plan.fsdp, kept_whole(core)
    for name, p in module._parameters.items():
        if p is None:
            continue
        full = canonical.get(f"{path}.{name}" if path else name, "")
        own = tuple(moves.get((path, full), ()))
        if full in whole and section and section.param_dtype and p.is_floating_point():
            # FSDP shows its parameters in the dtype of computation; one that it leaves alone is cast here.
            own = (partial(Tensor.to, dtype=section.param_dtype), *own)
        if own or dtensor or full in whole or (full and core.params[full].routed):
            found[name] = own
    return found


def _chain(many: list[Convert]) -> Convert:
    if len(many) == 1:
        return many[0]

    def run(x: Tensor) -> Tensor:
        for one in many:
            x = one(x)
        return x

    return run


def _mover(m: Move, groups: Groups) -> BoundMove:
    return BoundMove(m.src, m.dst, groups.group(m.axis), m.dim, m.size, m.parts)


def _converter(b: Boundary, groups: Groups) -> Convert:
    run = _mover(b.move, groups)
    if b.regather:
        return gathering_again(run, groups.group(b.move.axis), b.move.dim, b.move.size)
    if not b.shared:
        return run
    label = f"_meshplan_{b.move.axis}_{b.move.src}_{b.move.dst}_{b.move.dim}_{b.move.parts}"

    def once(x: Tensor) -> Tensor:
        # Kept on the tensor itself, so that it lives exactly as long and a recompute makes its own.
        made = x.__dict__.get(label)
        # What was made with gradients off carries none.
        if made is None or (x.requires_grad and torch.is_grad_enabled() and not made.requires_grad):
            made = run(x)
            setattr(x, label, made)
        return made

    return once


def _bound(
    edit: Edit,
    path: str,
    groups: Groups,
    streams: DropoutStreams,
    boundaries: tuple[Boundary, ...],
) -> BoundEdit:
    by_leaf = {(b.site.key, b.move): b for b in boundaries if b.site.side == "call" and b.site.module == path}
    converts: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    for leaf, m in edit.converts:
        b = by_leaf.get((f"{edit.ordinal}:{leaf}", m))
        converts.append((leaf, _converter(b, groups) if b else _mover(m, groups)))
    run = None
    if edit.replacement is not None:
        run = replace.bind(edit.replacement.name, dict(edit.replacement.settings), groups, streams)
    return BoundEdit(edit.func, edit.sized, tuple(converts), run, edit.where)
