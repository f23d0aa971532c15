"""plan + model + world size -> Core: capture the single device, propagate one rank until nothing changes, read off the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.beside import beside, moved, silent
from meshplan.compiler.bind import Bound, bind
from meshplan.compiler.capture import ModuleHooks, Ref, Trace, capture, tensors_in
from meshplan.compiler.check import CHECKS, Checked, check_uses
from meshplan.compiler.context import ContextAt, refuse_compiled_rings, refuse_unused
from meshplan.compiler.examples import Example, by_name, example_inputs, refuse_ignored
from meshplan.compiler.expand import expand_repeats
from meshplan.compiler.experts import ExpertsAt, refuse_compiled, refuse_uncalled
from meshplan.compiler.experts_check import check_experts
from meshplan.compiler.few_heads import SplitNeeded, split_spec, sub_axes, with_copies
from meshplan.compiler.fingerprint import fingerprint
from meshplan.compiler.flex import flexed, refuse_compiled_flex
from meshplan.compiler.foldable import foldable, heard_inside
from meshplan.compiler.fsdp_cuts import fsdp_cuts, shards_parameters
from meshplan.compiler.fsdp_reads import refuse_foreign_reads
from meshplan.compiler.gathers import regathered, sites_regathered
from meshplan.compiler.hooks import refuse_gradient_hooks
from meshplan.compiler.invocations import once, unlike
from meshplan.compiler.kept import refusal_of_kept
from meshplan.compiler.kinds import I, Kind, N, R
from meshplan.compiler.layout import Axis, Info, local_shape
from meshplan.compiler.lowered import Boundary, Core, ParamPlan, Program
from meshplan.compiler.outputs import refuse_unknown_outputs
from meshplan.compiler.precision import Precision
from meshplan.compiler.propagate import Pass, Propagation
from meshplan.compiler.repeats import Equals, FullTraceNeeded, apart
from meshplan.compiler.sites import Decisions, Site
from meshplan.compiler.skeleton import fake_copy, fake_world, preparing
from meshplan.compiler.source import raised_by_us
from meshplan.compiler.strategies import Chooser
from meshplan.compiler.uses import final
from meshplan.compiler.uses import settled as settled_kind
from meshplan.errors import PlanError
from meshplan.mesh.build import Groups, abstract_groups
from meshplan.mesh.spec import DATA_AXES, MeshSpec
from meshplan.ops.attention.flex import taken_on_rank
from meshplan.plan.placements import Placement, Shard
from meshplan.plan.plan import Plan

# What the model's own code may raise on local shapes where it did not on global ones.
PYTHON_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
MAX_PASSES = 16
MAX_GROUPINGS = 8
"""Ways of grouping equal layers that are tried before every layer is traced."""


def compile_core(
    model: nn.Module, plan: Plan, spec: MeshSpec, inputs: Mapping[str, Any] | None = None, rank: int = 0, *,
    check: str = "values", fold: bool = True,
) -> Core:  # fmt: skip
    """Derive the program of `rank`.

    Arguments:
        model: unchanged; its parameters may be on the meta device.
        inputs: global example inputs by argument name (tensors, `Input`, or Python constants) that add to or replace
            the plan's.
        check: "values" runs every distinct use of a rule with numbers (`meshplan.compiler.check`); "off" trusts the rules.
        fold: propagate one of equal layers for all; without, `Program.decided` has every call of every layer.

    Raises PlanError, each with the user's line: what `bind` raises, `rule-refuted`, `bad-check`, and `host-read`, `no-rule`,
    `diverged`, `random-op`, `no-redistribution`, `local-shape`, `in-place`, `mixed-use`, `axis-not-lowered`, `fsdp-no-dim`,
    `foreign-unit`, `kept-tensor`, `gradient-hook`, `forward-hook`.
    """
    refuse_unlowered(plan)
    if check not in CHECKS:
        raise PlanError(f"check={check!r}", code="bad-check", legal=list(CHECKS))
    bound = bind(plan, model, degrees=dict(spec.axes), given=tuple(by_name(model, inputs)))
    groups = abstract_groups(spec, rank)
    axes = [Axis(name, groups.group(name), name in DATA_AXES) for name, n in spec.axes if n > 1 and name != "pp"]
    if axes:
        refuse_gradient_hooks(model)
    examples = example_inputs(model, bound, inputs, {a.name: a.degree for a in axes})
    kinds = {name: _param_kinds(bound, name, axes) for name in bound.params}
    precision = Precision.of(bound, spec)
    bound, routed = ExpertsAt.of(bound, model, spec)
    model = precision.model(model)
    with fake_world() as mode, preparing(routed.put if routed else None):
        whole, further = ContextAt.split(routed.view.spec if routed else spec, plan.context), True
        while True:
            halved = split_spec(whole, kinds, axes, bound.params) if further else None
            if halved is None:
                # Two axes in turn would cut another parameter elsewhere, or copies do not help: heads are gathered.
                kinds = {name: _param_kinds(bound, name, axes) for name in bound.params}
                axes, further = [replace(axis, copies=False) for axis in axes], True
            spec = halved or whole
            try:
                trace, result, settled = _settled(
                    model, mode, bound, spec, rank, axes, examples, kinds, fold, precision, routed
                )
                break
            except SplitNeeded as found:
                held, kinds = kinds, with_copies(kinds, found.split, axes, bound.params)
                further = kinds != held
        if result.kept is not None:
            raise result.kept
        used = {v for call in trace.calls for v in call.ins} | {x.value for x in trace.outputs[0] if isinstance(x, Ref)}
        refuse_ignored(model, bound, examples, trace.given, used)
        decided = tuple(map(final, result.decided))
    checked = check_uses(decided, axes, trace) if check == "values" else Checked()
    if routed:
        routed, unchecked = check_experts(routed, model, trace, check == "values")
        checked = replace(checked, skipped=(*checked.skipped, *unchecked))
    result.beside = beside(trace, routed)
    expand_repeats(result, settled)
    program = replace(
        _program(bound, result, settled, axes, examples), checked=checked, asked=trace.asked, single=fingerprint(trace),
        flex=flexed(trace, result.repeats),
    )  # fmt: skip
    early = silent(result.beside, program, bound)
    program = replace(program, beside=early, events=moved(program.events, early))
    edits = [(path, e) for path, many in result.edits.items() for e in many.values()]
    refuse_unused(bound, ContextAt.of(bound, spec), edits)
    refuse_compiled_rings(bound, edits)
    refuse_compiled_flex(bound, program.flex)
    refuse_uncalled(bound, routed, edits)
    refuse_compiled(bound, routed)
    refuse_unknown_outputs(bound, result.layouts)
    core = Core(bound, spec, _params(bound, result, axes, kinds, spec, routed), program, examples, routed)
    fsdp_cuts(core)  # refuses what FSDP could not cut
    refuse_foreign_reads(core, result.reads)
    return core


def _settled(
    model: nn.Module, mode: Any, bound: Bound, spec: MeshSpec, rank: int, axes: list[Axis], examples: dict[str, Example],
    kinds: dict[str, list[Kind]], fold: bool, precision: Precision, routed: ExpertsAt | None,
) -> tuple[Trace, Pass, Decisions]:  # fmt: skip
    """Propagate with equal layers traced once; those that turn out to be handed unlike tensors on a rank, as the first layer may
    be, are then traced as another group, and in the end every layer is."""
    inputs = fake_inputs(examples, mode, None)
    groups = foldable(model, mode, bound, kinds, inputs, precision) if fold else {}
    for attempt in range(MAX_GROUPINGS + 1):
        equals = Equals(model, groups if attempt < MAX_GROUPINGS else {})
        try:
            skeleton, trace = capture(
                partial(fake_copy, model, mode, None, equals.hollow), mode, fake_inputs(examples, mode, None), equals,
                precision.inputs,
            )  # fmt: skip
            if heard_inside(skeleton, groups):
                groups = {}
                continue
            return trace, *_until_stable(
                model, mode, trace, bound, spec, rank, axes, examples, kinds, equals, precision, routed
            )
        except FullTraceNeeded as unlike:
            groups = apart(groups, unlike.path)
    raise AssertionError("a trace of every layer needs no other")


def refuse_unlowered(plan: Plan) -> None:
    if plan.mesh.get("pp", 1) != 1 or plan.pipeline is not None:
        raise PlanError(
            "this version does not lower the pp axis",
            code="axis-not-lowered",
            legal=["dp_replicate", "dp_shard", "cp", "tp"],
        )


def _param_kinds(bound: Bound, name: str, axes: list[Axis]) -> list[Kind]:
    placements = bound.params[name].placements
    out: list[Kind] = []
    for axis in axes:
        place = placements.get(axis.name)
        out.append(place if isinstance(place, Shard) else N)
    return out


def fake_inputs(examples: dict[str, Example], mode: Any, axes: list[Axis] | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    with mode:
        for name, example in examples.items():
            leaves = []
            for leaf in example.leaves:
                if isinstance(leaf.shape, tuple):
                    shape = leaf.shape if axes is None else local_shape(leaf.shape, leaf.kinds, axes)
                    leaves.append(torch.empty(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad))
                else:
                    leaves.append(leaf.constant)
            made[name] = compat.unflatten(leaves, example.structure)
    return made


def _until_stable(
    model: nn.Module, mode: Any, trace: Trace, bound: Bound, spec: MeshSpec, rank: int, axes: list[Axis],
    examples: dict[str, Example], kinds: dict[str, list[Kind]], equals: Equals, precision: Precision,
    routed: ExpertsAt | None,
) -> tuple[Pass, Decisions]:  # fmt: skip
    decisions = Decisions()
    for _ in range(MAX_PASSES):
        decisions.changed = False
        run = _one_pass(
            model, mode, trace, bound, spec, rank, axes, examples, kinds, decisions, equals, precision, routed
        )
        for site, axis, pending, where in run.gathers:
            kind = R if R in pending.find().needs else I
            if decisions.gathered.get((site, axis)) != kind:
                decisions.gathered[site, axis] = kind
                decisions.asked.setdefault(site, where)
                decisions.changed = True
                if site.side == "input":  # whatever the module does with it, before that use or after, sees the whole
                    decisions.add(site, axis, kind, where)
        if not decisions.changed:
            for site, name in run.late:  # another use there wants what the boundary does now
                decisions.contest(site, name)
        if not decisions.changed:
            try:
                run.result.moves, run.result.edits = once(run.result.invocations, run.result.moves)
            except PlanError as error:
                path = error.module or ""
                loose = _undeclared_outputs(run, path) - decisions.contested
                for site, name in loose:  # what one call's user asked for there, it does for itself
                    decisions.contest(site, name)
                if loose:
                    continue
                apart = {(path, key, axes[k].name) for key, k in unlike(run.result.invocations, path)}
                if apart <= decisions.alike:
                    raise
                decisions.alike |= apart
                continue
            mixed = _mixed(run.result, bound) - decisions.split
            if mixed:
                decisions.split |= mixed
                continue
            return run.result, decisions
    raise PlanError(
        "the layouts of this plan do not settle", code="no-fixpoint",
        legal="input and output layouts written out for the modules that `explain -v` lists",
    )  # fmt: skip


def _undeclared_outputs(run: Propagation, path: str) -> set[tuple[Site, str]]:
    """Where, and on which axes, outputs of the module at `path` are moved although the plan does not say so."""
    return {
        (site, move.axis)
        for site, move, _ in run.result.moves
        if site.module == path and site.side == "output" and move.axis not in run.declared(path, "output", site.key)
    }


def _mixed(result: Pass, bound: Bound) -> set[tuple[str, str]]:
    """Parameters, by axis, that one use needs both as R and as I, or different uses if not all are by modules that hold it:
    whoever reaches for a parameter of another module sees it as that module does."""
    needs: dict[tuple[str, str], set[object]] = {}
    reached: set[tuple[str, str]] = set()
    out = set()
    for (module, name, axis), pending in result.param_use.items():
        found = pending.find().needs
        needs.setdefault((name, axis), set()).update(found)
        if len(found) > 1:
            out.add((name, axis))
        if module not in {n.rpartition(".")[0] for n in bound.params[name].names}:
            reached.add((name, axis))
    return out | {key for key in reached if len(needs[key]) > 1}


def _one_pass(
    model: nn.Module, mode: Any, trace: Trace, bound: Bound, spec: MeshSpec, rank: int, axes: list[Axis],
    examples: dict[str, Example], kinds: dict[str, list[Kind]], decisions: Decisions, equals: Equals,
    precision: Precision, routed: ExpertsAt | None,
) -> Propagation:  # fmt: skip
    def shape_of(name: str, t: Tensor) -> tuple[int, ...]:
        return local_shape(t.shape, kinds[name], axes) if name in kinds else tuple(t.shape)

    local = fake_copy(model, mode, shape_of, equals.hollow)
    owners = {name.rpartition(".")[0] for name in bound.params for k in kinds[name] if isinstance(k, Shard)}
    owners |= {
        n.rpartition(".")[0]
        for p in bound.params.values()
        for n in p.names
        if any(isinstance(k, Shard) for k in kinds[p.name])
    }

    def declared(path: str, side: str, key: str) -> dict[str, Placement]:
        module = bound.modules.get(path)
        return dict(module.declared(side, key)) if module is not None else {}

    groups: Groups = abstract_groups(spec, rank)
    holders = {p.name: {n.rpartition(".")[0] for n in p.names} for p in bound.params.values()}
    chooser = Chooser(trace, groups, ContextAt.of(bound, spec), routed)
    run = Propagation(trace, axes, declared, owners, holders, decisions, chooser)
    heard = run.result.timeline.heard
    run.axes = [replace(a, group=type(a.group)(a.group.axis, a.group.size, a.group.rank, None, heard)) for a in axes]
    run.chooser.groups = abstract_groups(spec, rank, heard)
    if shards_parameters(bound.plan, spec):
        run.units, run.casts = frozenset(bound.fsdp_units), bound.plan.fsdp.param_dtype is not None  # type: ignore[union-attr]
    number = 0

    def label(module: nn.Module, prefix: str, number: int) -> int:
        run.result.timeline.constants |= {compat.storage_key(t) for t in (*module.parameters(), *module.buffers())}
        for name, p in module.named_parameters():
            run.label(p, Info(number, list(kinds[prefix + name]), False, prefix + name))
            number += 1
        for b in module.buffers():
            run.label(b, Info(number, [N] * len(axes), False))
            number += 1
        return number

    number = label(local, "", 0)

    def cast(path: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return precision.inputs(path, args, kwargs, run.relabel)

    hooks = ModuleHooks(run.before, run.after, run.stack, cast)

    def fill(path: str, module: nn.Module, value: int) -> None:
        equals.fill(path, module, mode, shape_of, run.grouped)
        label(module, f"{path}.", value)
        hooks.inside(path, module)

    run.fill = fill
    inputs = fake_inputs(examples, mode, axes)
    flat = [
        (leaf, t)
        for name, example in examples.items()
        for leaf, t in zip(example.leaves, compat.flatten(inputs[name])[0], strict=True)
    ]
    for leaf, t in flat:
        if isinstance(t, Tensor):
            run.label(
                t, Info(number, [k if isinstance(k, Shard) else I if t.requires_grad else N for k in leaf.kinds], True)
            )
            number += 1
    hooks.on(local)
    equals.intercept(local, run.grouped)

    watching = [run.result.timeline]

    def packed(t: Tensor) -> Tensor:
        for timeline in watching:
            timeline.saved(t)
        # A node that saves its own result would keep itself for good.
        return t if t.grad_fn is None else compat.detached(t)

    def unpacked(t: Tensor) -> Tensor:
        for timeline in watching:
            timeline.read()
        return t

    saving = torch.autograd.graph.saved_tensors_hooks(packed, unpacked)
    try:
        with mode, compat.on_cpu(), saving, run, compat.taking_flex(taken_on_rank()):
            try:
                out = local(**inputs)
            except PYTHON_ERRORS as error:
                if raised_by_us(error):
                    raise
                raise run.failed(error) from error
    except BaseException:
        run.result.timeline.forget()
        raise
    finally:
        watching.clear()  # autograd's graph keeps `packed`, and this pass keeps the graph
    if run.cursor != len(trace.calls):
        raise run.diverged("its forward ends")
    leaves = run.result.timeline.reached(tensors_in(out))
    run.result.reached = {name for name, p in local.named_parameters() if id(p) in leaves}
    run.result.kept = refusal_of_kept(run, local)
    run.result.merged = run.chooser.merged
    return run


def _program(bound: Bound, result: Pass, settled: Decisions, axes: list[Axis], examples: dict[str, Example]) -> Program:
    first_only = []
    uses = {use: pending.find().needs for use, pending in result.param_use.items()}
    partial = {(name, axis) for (_, name, axis), needs in uses.items() if R in needs}
    for (module, name, axis), needs in uses.items():
        if R in needs and I in needs:
            raise PlanError(
                f"{module} uses {name} both in a computation split over {axis} and in one that is not",
                code="mixed-use", where=result.used_at.get((module, name, axis)), module=module, legal="two modules, one a use",
            )  # fmt: skip
        if I in needs and (name, axis) in partial:
            # This use's gradient is whole on every rank while another's is partial: rank 0 alone adds it to the sum.
            if module not in {n.rpartition(".")[0] for n in bound.params[name].names}:
                raise PlanError(
                    f"{module or 'the model'} uses {name} of another module, and its gradient there is whole on {axis} while it "
                    "is partial elsewhere", code="mixed-use", where=result.used_at.get((module, name, axis)), module=module,
                    legal="the use inside the module that holds it",
                )  # fmt: skip
            first_only.append((module, name, axis))
    events = regathered(result.timeline.events, bound, result.shared)
    again = sites_regathered(events)
    boundaries = tuple(
        Boundary(
            site,
            move,
            (where is not None or site in settled.asked) and site not in settled.declared,
            site in result.shared,
            where or settled.asked.get(site),
            move.src == "S" and not move.parts and site in again,
        )
        for site, move, where in result.moves
    )
    return Program(
        signature=tuple((name, example.key()) for name, example in examples.items()),
        boundaries=boundaries,
        edits=result.edits,
        outputs=tuple((key, tuple(k), shape, scalar) for key, k, shape, scalar in result.outputs),
        layouts=tuple(
            (p, side, key, shape, tuple(settled_kind(k) for k in kinds))
            for p, side, key, shape, kinds in result.layouts
        ),
        events=events,
        axes=tuple(a.name for a in axes),
        first_only=tuple(first_only),
        calls=frozenset(result.calls),
        decided=tuple(map(final, result.decided)),
        spared=tuple(result.spared),
        merged=result.merged,
    )


def _params(
    bound: Bound, result: Pass, axes: list[Axis], kinds: dict[str, list[Kind]], spec: MeshSpec, routed: ExpertsAt | None
) -> dict[str, ParamPlan]:
    reduce: dict[str, set[str]] = {}
    for (_, name, axis), pending in result.param_use.items():
        if R in pending.find().needs:
            reduce.setdefault(name, set()).add(axis)
    # A shard that several ranks hold serves different heads on each.
    copied = {
        name: [
            sub_axes(a.name)[1] for a, k in zip(axes, kinds[name], strict=True) if isinstance(k, Shard) and k.copies > 1
        ]
        for name in bound.params
    }
    plans = {
        name: ParamPlan(
            name, p.shape, str(p.dtype).removeprefix("torch."), p.requires_grad,
            tuple((a.name, k) for a, k in zip(axes, kinds[name], strict=True) if isinstance(k, Shard)),
            (*(a.name for a in axes if a.name in reduce.get(name, ())), *copied[name]), name in result.reached,
        )
        for name, p in bound.params.items()
    }  # fmt: skip
    return plans | ({name: routed.spread(plans[name]) for name in routed.packed} if routed else {})
