"""Solve, write, lower: plans of one axis until lowering accepts one, keeping whole what it refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from meshplan.compiler.kinds import Kind, replicated
from meshplan.compiler.lowered_graph import Lowered
from meshplan.compiler.strategies import Chooser
from meshplan.cost.machine import Machine
from meshplan.errors import PlanError
from meshplan.lowering.lower import lower
from meshplan.mesh.build import abstract_groups
from meshplan.mesh.spec import DATA_AXES, MeshSpec
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.search.axis import AxisProblem, Choice, Limits
from meshplan.search.batch import batch_dims
from meshplan.search.options import options_of
from meshplan.search.stricter import stricter
from meshplan.search.trace import Traced
from meshplan.search.variants import add_variants
from meshplan.search.write import rules_of

ATTEMPTS = 12
"""Solutions lowered at most; then the axis is left without a split parameter."""
SLACK = 0.05
"""Without a memory bound, a rank holds this part more than the least bytes of split parameters: what small parameters would cost
to split is then left to communication to decide."""
CLOSE = 1.02
"""How much longer than the solution says the lowered plan's collectives may take before gathers are written out too."""


@dataclass
class Attempt:
    """A plan that lowered, the solution it was written from (None: nothing is split), what was refused before, the modelled
    seconds of its collectives on the axis, and the matrices that every rank keeps whole, with their bytes."""

    plan: Plan
    lowered: Lowered
    choice: Choice | None
    refused: list[PlanError] = field(default_factory=list)
    modelled: float = 0.0
    whole: list[tuple[str, int]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What was modelled and proved, as plain data: seconds and wire bytes a rank and step, parameter bytes of a rank on
        the axis, matrices that stay whole with their bytes, and codes of what was refused on the way."""
        out: dict[str, Any] = {"collectives_seconds": self.modelled, "whole": dict(self.whole)}
        if self.choice is not None:
            c = self.choice
            out |= {
                "seconds": c.seconds, "bound": c.bound, "gap": c.gap, "wire_bytes": c.cost.wire, "parameter_bytes": c.bytes,
                "rows": c.size[0], "columns": c.size[1],
            }  # fmt: skip
        return out | {"refused": [{"code": e.code, "module": e.module, "message": e.message} for e in self.refused]}


class Search:
    """One program on one axis: options are enumerated once, solved under changing limits."""

    def __init__(
        self, model: nn.Module, base: Plan, given: Mapping[str, Any], spec: MeshSpec, program: Traced, batched: Collection[str],
        machine: Machine, axis: str = "tp",
    ) -> None:  # fmt: skip
        self.model, self.base, self.given, self.spec, self.traced = model, base, given, spec, program
        self.machine, self.axis = machine, axis
        self.link = machine.link(spec, axis)
        chooser = Chooser(program.program.trace, abstract_groups(spec, 0))
        degree = spec.degree(axis)
        self.options = options_of(program.program, chooser, degree)
        add_variants(program.program, chooser, self.options, degree)
        size = next((program.inputs[key].shape[0] for key in batched), 1)
        dims = batch_dims(program.program, chooser, batched, _factor(size)) if batched else {}

        def barred(v: int, kind: Kind) -> bool:
            # Data axes split the batch; a dim split twice could not be gathered on one axis alone.
            return isinstance(kind, Shard) and dims.get(v) == kind.dim

        data = spec.degree(*DATA_AXES)
        self._by_data = barred
        self.share = lambda v: 1 / data if v in dims else 1.0

    def problem(self, limits: Limits) -> AxisProblem:
        return AxisProblem(
            self.traced.program,
            self.options,
            self.link,
            self.machine,
            replace(limits, barred=self._barred(limits), share=self.share),
        )

    def _barred(self, limits: Limits) -> Callable[[int, Kind], bool]:
        return lambda v, kind: self._by_data(v, kind) or (v in limits.values and not replicated(kind))

    def run(self, limits: Limits, seconds: float, gap: float) -> Attempt:
        """The best plan that lowers. Without a bound on bytes in `limits` a rank may hold a little more than the least. Raises
        PlanError where not even the model without a split parameter does. Where no plan with split sequences lowers, sequences
        are split where that pays, if anywhere."""
        refused: list[PlanError] = []
        asked = limits
        for _ in range(ATTEMPTS):
            problem = self.problem(limits)
            if limits.bytes is None:
                least = problem.least_bytes(seconds, gap)
                # Of what is split, that is: what nobody can split must not widen the bound for the rest.
                problem.bound(least + SLACK * (problem.whole_bytes - least) / (self.link.ranks - 1))
            choice = problem.solve(seconds, gap)
            try:
                found = self._lowered(choice)
                return replace(found, refused=refused)
            except PlanError as error:
                refused.append(error)
            _ = self._unsplit  # raises what no choice on this axis could mend
            held = stricter(self.traced.program, limits, refused[-1])
            if held is None:
                break
            limits = held
        if asked.sequence:
            found = self.run(replace(asked, sequence=None), seconds, gap)
            return replace(found, refused=[*refused, *found.refused])
        return Attempt(self.base, self._unsplit, None, refused)

    @cached_property
    def _unsplit(self) -> Lowered:
        """The model without a split parameter."""
        return self._lower(self.base)

    def _lowered(self, choice: Choice) -> Attempt:
        """The plan of `choice`, with gathers pinned only where lowering would otherwise do worse."""
        best: Attempt | None = None
        for gathers in (False, True):
            rules = rules_of(self.traced.program, choice, self.model, self.axis, gathers)
            plan = replace(self.base, rules=(*rules, *self.base.rules))
            try:
                lowered = self._lower(plan)
            except PlanError:
                if gathers and best is not None:
                    return best
                raise
            modelled = self._modelled(lowered)
            if best is None or modelled < best.modelled:
                best = Attempt(plan, lowered, choice, modelled=modelled)
            if modelled <= CLOSE * self._solved(choice):
                break
        assert best is not None
        return best

    def _lower(self, plan: Plan) -> Lowered:
        return lower(self.model, plan, self.spec.world_size, self.given)

    def _solved(self, choice: Choice) -> float:
        return sum(m.cost.seconds for m in choice.moves)

    def _modelled(self, lowered: Lowered) -> float:
        """Seconds of the collectives on the axis, one after another."""
        found = [c for c in lowered.collectives if c.axis == self.axis]
        return sum(self.link.seconds(c.op, c.bytes) for c in found)


def _factor(n: int) -> int:
    return next((d for d in range(2, n + 1) if n % d == 0), n)
