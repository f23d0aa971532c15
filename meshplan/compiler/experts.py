"""The plan's `experts` section on one model: which modules are experts, how their ranks lie, and how a call is split."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from meshplan.compiler.bind import Bound, BoundParam
from meshplan.compiler.capture import Call
from meshplan.compiler.edits import Edit, Replacement
from meshplan.compiler.layout import Axis
from meshplan.compiler.rules.base import REP, Strategy
from meshplan.errors import PlanError
from meshplan.mesh.expert_view import ExpertView, expert_view
from meshplan.mesh.spec import MeshSpec, divisors
from meshplan.ops.experts.call import MlpNames, Routed, routed_of
from meshplan.plan.patterns import match, within
from meshplan.plan.placements import Partial, Shard
from meshplan.plan.sections import Experts

if TYPE_CHECKING:
    from meshplan.compiler.lowered import ParamPlan

OPERATOR = "experts"
"""The semantic operator that routes tokens over the ranks of ep."""
INSIDE = "experts:inside"
"""The same on an axis on which the tokens are whole: the operator shares them out, and gathers the results."""


@dataclass(frozen=True)
class Found:
    """One experts module.

    Attributes:
        path: where it is.
        experts: how many it has.
        packed: names of its parameters, each of which holds all experts along dim 0 and is split over ep; empty where each
            expert has parameters of its own.
        listed: these then. They are whole on every rank and used on the rank of their expert alone: a step that gives an expert
            no token leaves it without a gradient, as on one device, which FSDP could not.
        sizes: its attributes that count the experts.
        inner: how etp splits each packed parameter, by its name in the module: a `Shard`, or `P` where its first rank alone
            computes with it (a bias that a sum must not have twice); others are whole.
        mlp: how it holds a gated MLP that the fused kernels can compute in its place.
    """

    path: str
    experts: int
    packed: tuple[str, ...]
    listed: tuple[str, ...]
    sizes: tuple[str, ...]
    inner: tuple[tuple[str, Shard | Partial], ...] = ()
    mlp: MlpNames | None = None

    def inner_of(self, name: str) -> Shard | Partial | None:
        """How etp splits the packed parameter `name` of the model."""
        return dict(self.inner).get(name.rpartition(".")[2])


@dataclass(frozen=True)
class ExpertsAt:
    """The experts modules of a plan, on a view of the mesh."""

    view: ExpertView
    modules: Mapping[str, Found]
    section: Experts

    @classmethod
    def of(cls, bound: Bound, model: nn.Module, spec: MeshSpec) -> tuple[Bound, ExpertsAt | None]:
        """`bound` with the experts modules themselves for its `experts`, and these; None where the plan has no such section.

        Raises PlanError: `expert-fold`, `experts-not-found`, `experts-split`.
        """
        section = bound.plan.experts
        if section is None:
            return bound, None
        try:
            view = expert_view(spec, section.ep, section.etp, section.inner or 1)
        except PlanError as error:
            raise error.at(section.source.where) from None
        found = {f.path: f for path in bound.experts for f in experts_in(path, model, bound)}
        for number, pattern in enumerate(section.at):
            if not any(within(f, path) for path in match(pattern, bound.experts) for f in found):
                raise PlanError(
                    f"no experts were found in {pattern or 'the model'}: no module there takes (tokens, indices, weights) and "
                    "holds as many equal parts of parameters", code="experts-not-found",
                    where=section.source.child("at").child(number).where,
                    legal="the MoE block or its experts module, whose forward(tokens [T, H], indices [T, k], weights [T, k]) "
                    "sums the weighted results of the experts; its parameters have an expert a row of dim 0, or it holds a "
                    "module an expert",
                )  # fmt: skip
        for f in found.values():
            if f.experts % section.ep:
                raise PlanError(
                    f"{f.path} has {f.experts} experts, and experts.ep is {section.ep}", code="experts-split", module=f.path,
                    where=section.source.child("ep").where, legal="ep: " + ", ".join(map(str, divisors(f.experts))),
                )  # fmt: skip
        return replace(bound, experts=tuple(found)), cls(view, found, section)

    @cached_property
    def packed(self) -> dict[str, Found]:
        """The experts module of each parameter that is split over ep."""
        return {name: f for f in self.modules.values() for name in f.packed}

    @cached_property
    def listed(self) -> frozenset[str]:
        """The parameters of experts that have some of their own."""
        return frozenset(name for f in self.modules.values() for name in f.listed)

    def shares_out(self, call: Call, axis: Axis) -> bool:
        """Whether tokens that are whole on `axis` are shared out among its ranks: on every axis but those of data, whose
        ranks average their losses.

        Raises PlanError `experts-tokens` where ep borrows such an axis.
        """
        if not axis.data:
            return True
        if axis.name in self.view.borrowed:
            raise PlanError(
                f"ep borrows {axis.name}, whose ranks all have the same tokens here", code="experts-tokens", where=call.where,
                module=call.module, legal=f"inputs placed {{{axis.name}: S(...)}} along a dim that divides over its ranks",
            )  # fmt: skip
        return False

    def replacement(
        self, module: str, inside: tuple[str, ...], tokens: Tensor, indices: Tensor, ranks: int
    ) -> Replacement:
        """The operator that runs for the experts at `module`.

        Arguments:
            inside: axes over which it shares out tokens.
            tokens, indices: of one device; ranks: over which they are split, by it or already.
        """
        found, etp = self.modules[module], self.view.axes("etp")
        copies = tuple(leaf for axis in inside for leaf in self.view.spec.leaves(axis) if leaf not in etp)
        rows = -(-tokens.shape[0] // ranks) * self.view.degree("etp")
        sent = (rows, indices.shape[1], tokens.shape[1], str(tokens.dtype).removeprefix("torch."))
        levels = self.view.levels if self.section.dispatch == "twolevel" else ((), ())
        return Replacement(
            OPERATOR,
            (
                ("module", module), ("experts", found.experts), ("ep", self.view.axes("ep")),
                ("dispatch", self.section.dispatch), ("nodes", levels[0]), ("node", levels[1]),
                ("payload", self.section.payload), ("packed", bool(found.packed)), ("copies", copies), ("etp", etp),
                ("etp_copies", "tp" in inside), ("equal", tokens.shape[0] % ranks == 0), ("sent", sent),
            ),
        )  # fmt: skip

    def spread(self, plan: ParamPlan) -> ParamPlan:
        """A packed parameter, split along dim 0 over the axes of ep in turn; its gradient is then a sum over the tokens of all
        ranks of ep, and still a summand over its copies.

        Raises PlanError `experts-split` where a rule splits it too.
        """
        axes = self.view.axes("ep")
        if not self.view.on:
            return plan  # every rank holds all experts
        if any(self.view.spec.degree(shard_axis) > 1 for shard_axis, _ in plan.shards):
            raise PlanError(
                f"{plan.name} holds experts, which are split over ep, and the plan splits it over {plan.shards[0][0]} too",
                code="experts-split", module=plan.name.rpartition(".")[0], legal="no rule for it",
            )  # fmt: skip
        etp, inner = self.view.axes("etp"), self.packed[plan.name].inner_of(plan.name)
        shards = [(axis, Shard(0)) for axis in axes]
        shards += [(axis, inner) for axis in etp if isinstance(inner, Shard)]
        held = {axis for axis, _ in shards}
        left = tuple(leaf for axis in plan.reduce for leaf in self.view.spec.leaves(axis) if leaf not in held)
        return replace(plan, shards=tuple(shards), reduce=left, routed=True)

    def put(self, model: nn.Module, prefix: str = "") -> None:
        """Let every experts module of `model`, which is the one at `prefix` (with a dot) of the whole model, be called as one
        operator."""
        for path, found in self.modules.items():
            if path.startswith(prefix):
                try:
                    module = model.get_submodule(path[len(prefix) :])
                except AttributeError:  # in a layer that another stands for
                    continue
                if routed_of(module) is None:
                    module.forward = Routed(module, path, found.sizes, found.mlp)


def experts_in(path: str, model: nn.Module, bound: Bound) -> list[Found]:
    """The experts modules at `path` or below it."""
    root = model.get_submodule(path)
    found: list[Found] = []
    for inner, module in root.named_modules():
        here = ".".join(filter(None, (path, inner)))
        if not any(within(here, f.path) for f in found) and _takes_three(module):
            params = {name: p for name, p in bound.params.items() if within(name, here)}
            experts = _count(module, here, params)
            if experts:
                packed = tuple(name for name in params if name.rpartition(".")[0] == here)
                packed, listed = (packed, ()) if len(packed) == len(params) else ((), tuple(params))
                counts = (k for k, v in module.__dict__.items() if type(v) is int and v == experts)
                sizes = tuple(counts) if packed else ()
                found.append(Found(here, experts, packed, listed, sizes))
    return found


def _takes_three(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(plain) == 3


def _count(module: nn.Module, path: str, params: Mapping[str, BoundParam]) -> int:
    """How many experts a module holds: the length of dim 0 of all its parameters, or its children that are alike; 0 if none."""
    if not params:
        return 0
    if all(name.rpartition(".")[0] == path for name in params):
        rows = {p.shape[0] if p.shape else 0 for p in params.values()}
        return rows.pop() if len(rows) == 1 and max(len(p.shape) for p in params.values()) > 2 else 0
    for children in (module, *module.children()):
        alike = {tuple((name, tuple(p.shape)) for name, p in child.named_parameters()) for child in children.children()}
        number = len(list(children.children()))
        if len(alike) == 1 and number > 1 and () not in alike:
            return number
    return 0


def strategies(call: Call) -> list[Strategy]:
    """Tokens anywhere: each rank routes its own, whole experts are reached through ep, and parameters' gradients are summands."""
    rest = (REP,) * (len(call.ins) - 3)
    return [Strategy((Shard(0), Shard(0), Shard(0), *rest), (Shard(0),), OPERATOR)]


def refuse_uncalled(bound: Bound, at: ExpertsAt | None, edits: Iterable[tuple[str, Edit]]) -> None:
    """Raise PlanError `experts-not-found` for experts that the model did not call."""
    if at is None:
        return
    ran = {path for path, e in edits if e.replacement is not None and e.replacement.name == OPERATOR}
    for path in at.modules:
        if path not in ran:
            section = bound.plan.experts
            assert section is not None
            raise PlanError(
                f"{path} is taken for experts, and the model did not call it", code="experts-not-found", module=path,
                where=section.source.child("at").where, legal="modules that the forward calls",
            )  # fmt: skip


def refuse_compiled(bound: Bound, at: ExpertsAt | None) -> None:
    """Raise PlanError `experts-inside-compile` for experts in a unit that torch is to compile: how many rows travel is known to
    the host alone, at every step anew, and no graph holds that."""
    section = bound.plan.compile
    if section is None or at is None:
        return
    for path in at.modules:
        unit = next((unit for unit in bound.compile_units if within(path, unit)), None)
        if unit is not None:
            raise PlanError(
                f"the experts of {path} route tokens between ranks, and {unit or 'the model'} is compiled",
                code="experts-inside-compile", module=path, where=section.source.where,
                legal="units to compile that have no experts in them, such as attention and shared experts",
            )  # fmt: skip
