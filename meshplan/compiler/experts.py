"""The plan's `experts` section on one model: which modules are experts, how their ranks lie, and how a call is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.bind import Bound
from meshplan.compiler.capture import Call, Ref, Trace
from meshplan.compiler.edits import Edit, Replacement
from meshplan.compiler.experts_found import Found, block_at, experts_in
from meshplan.compiler.kinds import Kind
from meshplan.compiler.layout import Axis
from meshplan.compiler.rules.base import REP, Strategy
from meshplan.errors import PlanError
from meshplan.mesh.expert_view import ExpertView, expert_view
from meshplan.mesh.spec import MeshSpec, divisors
from meshplan.ops.experts.block import Block, Law, block_call, tokens_of
from meshplan.ops.experts.call import Routed, experts_call, routed_of
from meshplan.plan.patterns import match, within
from meshplan.plan.placements import Shard
from meshplan.plan.sections import Experts

if TYPE_CHECKING:
    from meshplan.compiler.lowered import ParamPlan

CALLS = (experts_call, block_call)
"""The calls by which experts modules and blocks of experts are seen."""
OPERATOR = "experts"
"""The semantic operator that routes tokens over the ranks of ep."""
BLOCK = "experts_block"
"""The one that runs a block of experts, and in it the former."""
INSIDE = "experts:inside"
"""The same on an axis on which the tokens are whole: the operator shares them out, and gathers the results."""


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
        known: dict[Any, Law] = {}
        found = {f.path: f for path in bound.experts for f in experts_in(path, model, bound, known)}
        for number, pattern in enumerate(section.at):
            paths = match(pattern, bound.experts)
            if not any(within(f, path) for path in paths for f in found):
                alone = section.ep == 1 and section.etp == 1
                named = {f.path: f for path in paths for f in block_at(path, model, bound, alone, known)}
                found |= named
                if named:
                    continue
                raise PlanError(
                    f"no experts were found in {pattern or 'the model'}: no module there takes (tokens, indices, weights) and "
                    "holds as many equal parts of parameters, and none holds a list of modules that are alike",
                    code="experts-not-found", where=section.source.child("at").child(number).where,
                    legal="the MoE block or its experts module, whose forward(tokens [T, H], indices [T, k], weights [T, k]) "
                    "sums the weighted results of the experts; its parameters have an expert a row of dim 0, or it holds a "
                    "module an expert; or a block that calls such modules itself, one by one; with ep: 1 any block",
                )  # fmt: skip
        for f in found.values():
            if f.experts % section.ep:
                raise PlanError(
                    f"{f.path} has {f.experts} experts, and experts.ep is {section.ep}", code="experts-split", module=f.path,
                    where=section.source.child("ep").where, legal="ep: " + ", ".join(map(str, divisors(f.experts))),
                )  # fmt: skip
        for f in found.values():
            if f.block is not None:
                refuse_inside(f, bound, spec, section.etp)
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
        rows = -(-tokens.shape[0] // ranks) * self.view.degree("etp")
        sent = (rows, indices.shape[1], tokens.shape[1], str(tokens.dtype).removeprefix("torch."))
        return Replacement(
            OPERATOR,
            (
                *self._dispatch(module, inside, sent), ("packed", bool(found.packed)), ("etp", etp),
                ("etp_copies", "tp" in inside), ("equal", tokens.shape[0] % ranks == 0),
            ),
        )  # fmt: skip

    def block_replacement(
        self, module: str, inside: tuple[str, ...], split: tuple[str, ...], law: Law, tokens: Tensor, ranks: int
    ) -> Replacement:
        """The operator that runs for the block at `module`.

        Arguments:
            inside: axes over which it shares out tokens; split: these and those on which ranks have tokens of their own.
            law: of the block; tokens: of one device; ranks: over which they are split, by it or already.
        """
        rows = -(-tokens[..., 0].numel() * law.rows // ranks)
        sent = (rows, 1, law.width, str(tokens.dtype).removeprefix("torch."))
        own = tuple(leaf for axis in split for leaf in self.view.spec.leaves(axis))
        return Replacement(BLOCK, (*self._dispatch(module, inside, sent), ("split", own)))

    def _dispatch(
        self, module: str, inside: tuple[str, ...], sent: tuple[int, int, int, str]
    ) -> tuple[tuple[str, Any], ...]:
        """The settings by which rows are sent to experts; `sent` says of a rank's how many, for how many experts each, of how
        many numbers and in which dtype."""
        experts, etp = self.modules[module].experts, self.view.axes("etp")
        copies = tuple(leaf for axis in inside for leaf in self.view.spec.leaves(axis) if leaf not in etp)
        levels = self.view.levels if self.section.dispatch == "twolevel" else ((), ())
        return (
            ("module", module), ("experts", experts), ("ep", self.view.axes("ep") if experts else ()),
            ("dispatch", self.section.dispatch), ("nodes", levels[0]), ("node", levels[1]), ("payload", self.section.payload),
            ("copies", copies), ("sent", sent),
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
                held = module.__dict__.get("_meshplan_forward", module.forward)  # of a model that is lowered already
                if found.block is not None and not isinstance(held, Block):
                    module.forward = Block(module, path, found.each, found.block)  # type: ignore[method-assign, assignment]
                elif found.block is None and routed_of(module) is None:
                    module.forward = Routed(module, path, found.sizes, found.mlp)


def strategies(call: Call, trace: Trace, degree: int) -> list[Strategy]:
    """Tokens anywhere: each rank routes its own, whole experts are reached through ep, and parameters' gradients are summands.
    `degree` ranks split a dim of a block's tokens where all its results are in stretches then."""
    number = given_to(call)
    rest = (REP,) * (len(call.ins) - number)
    if call.func is experts_call:
        return [Strategy((Shard(0), Shard(0), Shard(0), *rest), (Shard(0),), OPERATOR)]
    law, tokens = law_of(call, trace)
    found = []
    for dim, size in enumerate(tokens.shape[:-1]):
        outs = [m.split(dim, size % degree == 0) for m in law.made]
        if None not in outs:
            kinds: tuple[Kind, ...] = (*(Shard(dim),) * number, *rest)
            found.append(Strategy(kinds, tuple(Shard(d) for d in outs if d is not None), OPERATOR))
    return found


def law_of(call: Call, trace: Trace) -> tuple[Law, Tensor]:
    """The law of the block that a recorded call runs, and its tokens on one device."""
    leaves = [trace.values[x.value] if isinstance(x, Ref) else x for x in call.leaves]
    (own, *arguments, _), _ = compat.unflatten(leaves, call.structure)
    given, structure = compat.flatten(tuple(arguments))
    return own.laws(given, structure), tokens_of(given, own.path)


def given_to(call: Call) -> int:
    """How many tensors experts, or a block of them, are given beside their parameters in a recorded call."""
    if call.func is experts_call:
        return 3
    parameters = compat.unflatten(list(call.leaves), call.structure)[0][3]
    return len(call.ins) - len(parameters)


def refuse_inside(f: Found, bound: Bound, spec: MeshSpec, etp: int) -> None:
    """Raise PlanError `experts-split` where the plan splits, or places, what runs inside the block `f`: its code runs on a rank
    as it is on one device, on fewer tokens."""
    name = f.path or "the model"
    legal = "no rule for it"
    if etp > 1:
        raise PlanError(
            f"{name} calls its experts itself, and the plan splits each of them over etp {etp}", code="experts-split",
            module=f.path, legal="etp: 1, or an experts module whose parameters have an expert a row of dim 0",
        )  # fmt: skip
    for p in bound.params.values():
        split = [axis for axis, place in p.placements.items() if isinstance(place, Shard) and spec.degree(axis) > 1]
        if split and within(p.name, f.path):
            raise PlanError(
                f"{name} calls its experts itself, with all of {p.name}, which the plan splits over {split[0]}",
                code="experts-split", module=f.path, legal=legal,
            )  # fmt: skip
    for path, m in bound.modules.items():
        if path != f.path and within(path, f.path) and (m.input or m.output):
            raise PlanError(
                f"{name} calls its experts itself, and the plan places what {path} in it is given or returns",
                code="experts-split", module=f.path, legal=legal,
            )  # fmt: skip


def refuse_uncalled(bound: Bound, at: ExpertsAt | None, edits: Iterable[tuple[str, Edit]]) -> None:
    """Raise PlanError `experts-not-found` for experts that the model did not call."""
    if at is None:
        return
    ran = {path for path, e in edits if e.replacement is not None and e.replacement.name in (OPERATOR, BLOCK)}
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
        unit = bound.compile_unit_of(path)
        if unit is not None:
            raise PlanError(
                f"the experts of {path} route tokens between ranks, and {unit or 'the model'} is compiled",
                code="experts-inside-compile", module=path, where=section.source.where,
                legal="units to compile that have no experts in them, such as attention and shared experts",
            )  # fmt: skip
