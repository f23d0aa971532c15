"""bind: matches a plan's rules to a model's modules and parameters, and refuses what cannot be meant."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshplan.compiler.bind_inputs import bind_inputs
from meshplan.compiler.claims import Claim, Claims
from meshplan.compiler.signature import arguments_of
from meshplan.errors import PlanError, Where
from meshplan.plan.layouts import Layout
from meshplan.plan.names import ModelNames, ModuleEntry, ParamEntry, names_of
from meshplan.plan.patterns import match, nearest, unused, within
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.plan.rules import Input, Rule
from meshplan.plan.shorthands import expand
from meshplan.plan.source import Source
from meshplan.plan.values import nearest_word


@dataclass(frozen=True)
class BoundParam:
    """One parameter object of the model, with what the plan declares of it.

    Attributes:
        name: its first name, as `model.named_parameters()` gives it.
        names: all its names; more than one for tied weights.
        shape: global sizes.
        dtype: torch dtype.
        requires_grad: whether it is trained.
        placements: declared placement by axis, dims not negative; empty where nothing is declared.
        where: the place of the first declaration, None without one.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: Layout
    where: Where | None


@dataclass(frozen=True)
class BoundModule:
    """One module object whose boundary the plan speaks of.

    Attributes:
        path: its first path, as `model.get_submodule` takes it; inside a wrapper, that of the wrapped module.
        paths: all its paths.
        input: declared layout by argument name, or by key path into an argument (`batch.mask`), or by position
            (`"1"`) where it falls into `*args`.
        output: declared layout by index or key path; `""` is every tensor that has no key of its own.
        where: the place of the first declaration.
    """

    path: str
    paths: tuple[str, ...]
    input: dict[str, Layout]
    output: dict[str, Layout]
    where: Where | None

    def declared(self, side: str, key: str) -> Layout:
        """What is declared of one tensor that crosses; `key` is "" for the only one that a module returns, which is also "0"."""
        if side == "input":
            return self.input.get(key, {})
        only = {"": self.output["0"]} if "0" in self.output else {}
        return (only | self.output).get(key, self.output.get("", {}))


@dataclass(frozen=True)
class Bound:
    """A plan matched to a model. Everything is in the model's own order.

    Attributes:
        plan: the plan.
        params: every parameter of the model, by first name.
        modules: the modules with a declared boundary, by path.
        inputs: the plan's inputs, dims of `place` not negative where the shape is known.
        fsdp_units, recompute_units, compile_units: module paths of the sections' units; recompute_units only of a
            section that recomputes.
        regather_units: module paths inside which sequences are gathered again in backward.
        attention: module paths of `context.attention`; stage_starts: of `pipeline.split`.
        experts: module paths of `experts.at`; once they are found, of the experts modules there.
        shard_dims: dim to shard on the data axes, by parameter name, where `fsdp.shard_dims` names it.
        matches: each rule with the module paths it matched.
    """

    plan: Plan
    params: dict[str, BoundParam]
    modules: dict[str, BoundModule]
    inputs: dict[str, Input]
    fsdp_units: tuple[str, ...]
    recompute_units: tuple[str, ...]
    regather_units: tuple[str, ...]
    compile_units: tuple[str, ...]
    attention: tuple[str, ...]
    experts: tuple[str, ...]
    stage_starts: tuple[str, ...]
    shard_dims: dict[str, int]
    matches: tuple[tuple[Rule, tuple[str, ...]], ...]

    def compile_unit_of(self, path: str) -> str | None:
        """The unit that torch is to compile in which module `path` is; None if it is in none."""
        return next((unit for unit in self.compile_units if within(path, unit)), None)

    def match_table(self) -> str:
        """One line a rule: its pattern, how many modules it matched, and the first and last of them."""
        width = max((len(rule.at) for rule, _ in self.matches), default=0)
        lines = []
        for rule, paths in self.matches:
            shown = [path or "(the model itself)" for path in (paths[:1] + paths[1:][-1:])]
            lines.append(f"{rule.at:<{width}}  {len(paths):>4}  {' .. '.join(shown)}")
        return "\n".join(lines)


def bind(
    plan: Plan, model: nn.Module, *, degrees: Mapping[str, int] | None = None, given: Collection[str] = ()
) -> Bound:
    """Match `plan` to `model`, which may be on the meta device and is not changed.

    Arguments:
        degrees: resolved degree by axis, for what a -1 in the plan's mesh became. Divisibility is checked on the axes
            whose degree is known from here or from the plan.
        given: names of arguments of the model's forward that come from elsewhere than the plan's inputs.

    Raises PlanError, each with the place in the plan: `no-such-module`, `adapter-moved`, `no-such-parameter`,
    `no-such-argument`, `more-layouts-than-inputs`, `missing-input`, `two-rules`, `two-layouts`, `tied-layouts`,
    `dim-out-of-range`, `bad-parts`, `parts-not-divisible`, `input-not-divisible`, `no-forward`, `shorthand-misfit`,
    `shorthand-unclear`, `already-sharded`, `lazy-parameter`.
    """
    names = names_of(model)
    known = {axis: degree for axis, degree in plan.mesh.items() if degree != -1} | dict(degrees or {})
    claims = Claims()
    matches = []
    for rule in plan.rules:
        entries = _matching(rule.at, names, rule.source.child("at"))
        matches.append((rule, tuple(entry.path for entry in entries)))
        for entry in entries:
            _claim(rule, entry, names, claims, known)
    modules = {
        entry.path: BoundModule(
            entry.path,
            entry.paths,
            claims.layouts(entry.path, "input"),
            claims.layouts(entry.path, "output"),
            claims.where(entry.path),
        )
        for entry in names.modules
        if (entry.path, "input") in claims.boundaries or (entry.path, "output") in claims.boundaries
    }

    def units(key: str, field: str = "units", called: bool = True) -> tuple[str, ...]:
        section = getattr(plan, key)
        patterns = getattr(section, field) if section is not None else ()
        source = section.source.child(field) if section is not None else Source()
        return _units(patterns if isinstance(patterns, tuple) else (), names, source, called)

    recomputes = plan.recompute is None or plan.recompute.policy != "none"
    return Bound(
        plan=plan,
        params={entry.name: _bound_param(entry, claims.params.get(entry.name, {})) for entry in names.params},
        modules=modules,
        inputs=bind_inputs(plan, arguments_of(names.module_by_name[""].module), known, given),
        fsdp_units=units("fsdp"),
        recompute_units=units("recompute") if recomputes else (),
        regather_units=units("recompute") if not recomputes else (),
        compile_units=units("compile"),
        attention=units("context", "attention"),
        # Experts may be a ModuleList, which is never called itself.
        experts=units("experts", "at", called=False),
        stage_starts=units("pipeline", "split"),
        shard_dims=_shard_dims(plan, names),
        matches=tuple(matches),
    )


def _matching(pattern: str, names: ModelNames, source: Source) -> list[ModuleEntry]:
    """The modules at `pattern`; every alternative in its braces has to lead to one."""
    entries = names.match(pattern)
    if entries:
        stray = unused(pattern, names.module_by_name)
        if not stray:
            return entries
        raise PlanError(
            f"{stray[0]!r} in {pattern!r} matches no module",
            code="no-such-module",
            where=source.where,
            legal=sorted({name.rpartition(".")[2] for name in nearest(pattern, names.module_by_name, 8)}),
        )
    moved = names.moved(pattern)
    if moved:
        raise PlanError(
            f"{pattern!r} matches no module: adapters changed the names it means, "
            f"{len(moved)} of them, such as {moved[0]!r}",
            code="adapter-moved",
            where=source.where,
            legal=[*nearest(pattern + "*", moved), "for the whole plan: plan.adapted(model)"],
        )
    raise PlanError(
        f"{pattern!r} matches no module",
        code="no-such-module",
        where=source.where,
        legal=nearest(pattern, names.module_by_name) or "the empty path, the model itself",
    )


def _claim(rule: Rule, entry: ModuleEntry, names: ModelNames, claims: Claims, known: Mapping[str, int]) -> None:
    """Add to `claims` what `rule` says of the module `entry`."""
    with _in_module(entry.name):
        explicit = expand(rule, entry.module)
    below = names.params_of(entry)
    prefix = f"{entry.name}." if entry.name else ""
    for name, layout in explicit.params.items():
        if name not in below:
            raise _no_such_parameter(name, below, entry, rule.source.child("params", name).key_where)
        for axis, placement in layout.items():
            where = _place(rule, "params", name, axis)
            if isinstance(placement, Shard):
                placement = _check_shard(prefix + name, below[name], axis, placement, known.get(axis), where)
            claims.claim_param(below[name], prefix + name, axis, Claim(placement, rule, prefix + name, where))
    for side, layouts in (("input", explicit.input), ("output", explicit.output)):
        if layouts and not entry.has_forward:
            raise _no_forward(entry, rule.source.child(side).where)
        for key, layout in layouts.items():
            for axis, placement in layout.items():
                where = _place(rule, side, key, axis)
                target = key
                if side == "input":
                    target = arguments_of(entry.module).resolve(key, where=where, module=entry.name)
                claims.claim_boundary(entry, side, target, axis, Claim(placement, rule, target, where))


def _place(rule: Rule, section: str, key: str, axis: str) -> Where | None:
    """The place of a placement the rule says itself, or that of the shorthand it comes from."""
    layouts: dict[str, Layout] = getattr(rule, section)
    if axis not in layouts.get(key, {}):
        return rule.source.child("use").where
    # The bare form `{tp: S(1)}` is written without the key it is kept under.
    return rule.source.child(section, *([key] if key else []), axis).where


def _check_shard(
    name: str, entry: ParamEntry, axis: str, shard: Shard, degree: int | None, where: Where | None
) -> Shard:
    """`shard` with its dim counted from the front, checked against the parameter's sizes."""
    shape, module = tuple(entry.param.shape), name.rpartition(".")[0]
    dims = len(shape)
    if not -dims <= shard.dim < dims:
        raise PlanError(
            f"parameter {name!r} has shape {list(shape)}, and no dim {shard.dim} to shard on {axis}",
            code="dim-out-of-range",
            where=where,
            module=module,
            legal=[f"S({dim})" for dim in range(dims)] or "R: a single number cannot be split",
        )
    shard = replace(shard, dim=shard.dim % dims)
    if shard.parts is None:
        return shard
    size = shape[shard.dim]
    if sum(shard.parts) != size:
        raise PlanError(
            f"parts {list(shard.parts)} of {name!r} sum to {sum(shard.parts)}, and dim {shard.dim} has size {size}",
            code="bad-parts",
            where=where,
            module=module,
            legal=f"sizes that sum to {size}",
        )
    if degree is not None:
        for i, part in enumerate(shard.parts):
            if part % degree:
                common = math.gcd(*shard.parts)
                divisors = [str(d) for d in range(1, common + 1) if common % d == 0]
                raise PlanError(
                    f"part {i} of {name!r} has size {part}, which {axis} {degree} does not divide "
                    f"(dim {shard.dim} is stored as {size})",
                    code="parts-not-divisible",
                    where=where,
                    module=module,
                    legal=f"{axis} of degree {' or '.join(divisors)}",
                )
    return shard


def _bound_param(entry: ParamEntry, claims: Mapping[str, Claim]) -> BoundParam:
    return BoundParam(
        name=entry.name,
        names=entry.names,
        shape=tuple(entry.param.shape),
        dtype=entry.param.dtype,
        requires_grad=entry.param.requires_grad,
        placements={axis: claim.placement for axis, claim in claims.items()},
        where=next((claim.where for claim in claims.values()), None),
    )


def _units(patterns: tuple[str, ...], names: ModelNames, source: Source, called: bool) -> tuple[str, ...]:
    found: set[str] = set()
    for i, pattern in enumerate(patterns):
        for entry in _matching(pattern, names, source.child(i)):
            if called and not entry.has_forward:
                raise _no_forward(entry, source.child(i).where)
            found.add(entry.path)
    return tuple(entry.path for entry in names.modules if entry.path in found)


def _shard_dims(plan: Plan, names: ModelNames) -> dict[str, int]:
    """`fsdp.shard_dims` by parameter name."""
    out: dict[str, int] = {}
    if plan.fsdp is None or plan.fsdp.shard_dims is None:
        return out
    source = plan.fsdp.source.child("shard_dims")
    for pattern, dim in plan.fsdp.shard_dims.items():
        at = source.child(pattern)
        found = {names.param_by_name[name].name: name for name in match(pattern, names.param_by_name)}
        if not found:
            raise PlanError(
                f"{pattern!r} in fsdp.shard_dims matches no parameter",
                code="no-such-parameter",
                where=at.key_where,
                legal=nearest(pattern, names.param_by_name) or "a model with parameters",
            )
        for first, name in found.items():
            shard = _check_shard(name, names.param_by_name[name], "dp_shard", Shard(dim), None, at.where)
            if out.setdefault(first, shard.dim) != shard.dim:
                raise PlanError(
                    f"fsdp.shard_dims gives parameter {name!r} the dims {out[first]} and {shard.dim}",
                    code="two-rules",
                    where=at.where,
                    legal="one dim for each parameter",
                )
    return out


def _no_such_parameter(
    name: str, below: Mapping[str, ParamEntry], entry: ModuleEntry, where: Where | None
) -> PlanError:
    moved = f"base_layer.{name}"
    if moved in below:
        return PlanError(
            f"an adapter moved parameter {name!r} of {entry.name!r} to {moved!r}",
            code="adapter-moved",
            where=where,
            module=entry.name,
            legal=[moved],
        )
    buffers = dict(entry.module.named_buffers())
    why = "; it is a buffer, and the layout of buffers is inferred" if name in buffers else nearest_word(name, below)
    return PlanError(
        f"module {entry.name!r} has no parameter {name!r}{why}",
        code="no-such-parameter",
        where=where,
        module=entry.name,
        legal=list(below)[:8] or "a module with parameters",
    )


def _no_forward(entry: ModuleEntry, where: Where | None) -> PlanError:
    return PlanError(
        f"{entry.name!r} is a {type(entry.module).__name__}, which is never called: it has no input, output or unit",
        code="no-forward",
        where=where,
        module=entry.name,
        legal=f"{entry.name}.*" if entry.name else "*",
    )


@contextlib.contextmanager
def _in_module(name: str) -> Iterator[None]:
    """Gives a PlanError that was raised inside without a module the module `name`."""
    try:
        yield
    except PlanError as error:
        if error.module is not None:
            raise
        raise error.at(module=name) from None
