"""Who said what: each placement on one axis of one tensor has one owner, and a second one is refused or overrides."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.errors import PlanError, Where
from meshplan.plan.layouts import Layout
from meshplan.plan.names import ModuleEntry, ParamEntry
from meshplan.plan.placements import Placement
from meshplan.plan.rules import Rule


@dataclass(frozen=True)
class Claim:
    """One placement that a rule gives to one tensor on one axis; `name` is the tensor's name as the rule reached it."""

    placement: Placement
    rule: Rule
    name: str
    where: Where | None


@dataclass
class Claims:
    """The claims of a plan's rules, gathered in rule order.

    Attributes:
        params: by parameter (its first name) and axis.
        boundaries: by module path, side (`input` or `output`), tensor key and axis.
    """

    params: dict[str, dict[str, Claim]] = field(default_factory=dict)
    boundaries: dict[tuple[str, str], dict[str, dict[str, Claim]]] = field(default_factory=dict)
    _by_name: dict[tuple[str, str], Claim] = field(default_factory=dict)

    def claim_param(self, entry: ParamEntry, name: str, axis: str, claim: Claim) -> None:
        """Raises PlanError `two-rules`, or `tied-layouts` where two names of one weight are laid out differently."""
        axes = self.params.setdefault(entry.name, {})
        same, old = self._by_name.get((name, axis)), axes.get(axis)
        if same is not None and not claim.rule.override:
            raise _two_rules(f"parameter {name!r}", axis, same, claim, name.rpartition(".")[0])
        if old is not None and old.placement != claim.placement and not claim.rule.override:
            raise PlanError(
                f"{old.name!r} and {name!r} are one tied weight, and are placed on {axis} as {old.placement}"
                f"{_at(old)} and as {claim.placement}",
                code="tied-layouts",
                where=claim.where,
                module=name.rpartition(".")[0],
                legal="one layout for all names of a weight; splitting rows (the vocabulary) serves both uses",
            )
        axes[axis] = self._by_name[name, axis] = claim

    def claim_boundary(self, entry: ModuleEntry, side: str, key: str, axis: str, claim: Claim) -> None:
        """Raises PlanError `two-rules`, or `two-layouts` within one rule. The key `""` of an output is every tensor."""
        tensors = self.boundaries.setdefault((entry.path, side), {})
        rivals = [
            (other, axes[axis])
            for other, axes in tensors.items()
            if axis in axes and (other == key or "" in (other, key))
        ]
        if rivals and not claim.rule.override:
            old = rivals[0][1]
            what = f"{side} {key!r}" if key else f"the {side}"
            if old.rule is claim.rule:
                raise PlanError(
                    f"the rule places {what} of {entry.name!r} on {axis} as {old.placement} and as {claim.placement}",
                    code="two-layouts",
                    where=claim.where,
                    module=entry.name,
                    legal="one layout for each tensor",
                )
            raise _two_rules(what, axis, old, claim, entry.name)
        for other, _ in rivals:
            if key == "":
                # A later word on every tensor leaves none of the earlier ones.
                del tensors[other][axis]
        tensors.setdefault(key, {})[axis] = claim

    def layouts(self, path: str, side: str) -> dict[str, Layout]:
        """The claimed layouts of one side of a module, by tensor key."""
        tensors = self.boundaries.get((path, side), {})
        return {key: {axis: claim.placement for axis, claim in axes.items()} for key, axes in tensors.items() if axes}

    def where(self, path: str) -> Where | None:
        """The place of the first claim on a boundary of the module at `path`."""
        claims = (
            claim
            for side in ("input", "output")
            for axes in self.boundaries.get((path, side), {}).values()
            for claim in axes.values()
        )
        return next((claim.where for claim in claims), None)


def _two_rules(what: str, axis: str, old: Claim, new: Claim, module: str) -> PlanError:
    return PlanError(
        f"{what} is placed on {axis} by two rules: as {old.placement}{_at(old)} and as {new.placement} by the rule at "
        f"{new.rule.at!r}",
        code="two-rules",
        where=new.where,
        module=module,
        legal="one rule for each thing on each axis, or `override: true` in the later rule",
    )


def _at(claim: Claim) -> str:
    place = f", {claim.where}" if claim.where else ""
    return f" (rule at {claim.rule.at!r}{place})"
