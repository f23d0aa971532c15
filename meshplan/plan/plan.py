"""The plan: a mesh, and where a model's parameters and a few activations live on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshplan.errors import PlanError, Where
from meshplan.plan.layouts import AXES
from meshplan.plan.rules import Input, Rule, inputs_from, rules_from
from meshplan.plan.sections import Compile, Context, Experts, Fsdp, Pipeline, Recompute, Section, section_from
from meshplan.plan.source import Source, user_source
from meshplan.plan.values import as_choice, as_mapping, check_keys, nearest_word

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SECTIONS", "Input", "Plan", "Rule"]

SECTIONS: dict[str, type[Section]] = {
    section.name: section for section in (Fsdp, Context, Experts, Pipeline, Recompute, Compile)
}
"""Section classes by their key in a plan."""

REGIONS = ("auto", "dtensor")


@dataclass(frozen=True)
class Plan:
    """What a user writes, checked by itself; `bind` checks it against a model.

    Attributes:
        mesh: degree by axis, outermost first; the order is kept, and one degree may be -1 for whatever is left.
            An axis that is left out has degree 1.
        rules: where parameters and boundary tensors live.
        inputs: the model's inputs, by argument name or key path.
        fsdp, context, experts, pipeline, recompute, compile: the sections, each as its dataclass or the same keys in a
            dict; None where the plan has none.
        regions: `auto`, or `dtensor` to run everything with DTensor semantics (slow, for reference).
        note: what stands above the plan in its file, as comments.

    Every check raises PlanError with the line the offending value was written on.
    """

    mesh: dict[str, int]
    inputs: dict[str, Input] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    fsdp: Fsdp | None = None
    context: Context | None = None
    experts: Experts | None = None
    pipeline: Pipeline | None = None
    recompute: Recompute | None = None
    compile: Compile | None = None
    regions: str = "auto"
    note: str = field(default="", compare=False, repr=False, kw_only=True)
    source: Source = field(default_factory=user_source, compare=False, repr=False, kw_only=True)

    if TYPE_CHECKING:
        # What may be given is wider than what is kept.
        def __init__(
            self,
            mesh: Mapping[str, int],
            inputs: Mapping[str, Input | Mapping[str, Any]] = ...,
            rules: Sequence[Rule | Mapping[str, Any]] = (),
            fsdp: Fsdp | Mapping[str, Any] | None = None,
            context: Context | Mapping[str, Any] | None = None,
            experts: Experts | Mapping[str, Any] | None = None,
            pipeline: Pipeline | Mapping[str, Any] | None = None,
            recompute: Recompute | Mapping[str, Any] | None = None,
            compile: Compile | Mapping[str, Any] | None = None,
            regions: str = "auto",
            *,
            note: str = ...,
            source: Source = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        here = self.source
        object.__setattr__(self, "mesh", _mesh(self.mesh, here.child("mesh")))
        object.__setattr__(self, "inputs", inputs_from(self.inputs or {}, here.child("inputs")))
        object.__setattr__(self, "rules", rules_from(self.rules or (), here.child("rules")))
        for key, cls in SECTIONS.items():
            object.__setattr__(self, key, section_from(cls, getattr(self, key), here.child(key)))
        as_regions(self.regions, here.child("regions"))

    @property
    def where(self) -> Where | None:
        """The place the plan was written at."""
        return self.source.where

    def degree(self, axis: str) -> int:
        """The degree the plan gives `axis`: 1 for an axis it leaves out, -1 for whatever is left of the world."""
        return self.mesh.get(axis, 1)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], source: Source | None = None) -> Plan:
        """A plan from the mapping a plan file holds. The inverse of `to_dict`.

        Raises PlanError `unknown-key`, `missing-key`, and those of every part.
        """
        source = source or user_source()
        legal = ("mesh", "inputs", "rules", *SECTIONS, "regions")
        check_keys("a plan", as_mapping("a plan", value, source), legal, source)
        if "mesh" not in value:
            raise PlanError("the plan lacks `mesh`", code="missing-key", where=source.where, legal="mesh: {tp: 2}")
        return cls(**value, source=source)

    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers, lists and dicts, without what is left to its default."""
        out: dict[str, Any] = {"mesh": dict(self.mesh)}
        if self.inputs:
            out["inputs"] = {name: item.to_dict() for name, item in self.inputs.items()}
        if self.rules:
            out["rules"] = [rule.to_dict() for rule in self.rules]
        for key in SECTIONS:
            section = getattr(self, key)
            if section is not None:
                out[key] = section.to_dict()
        if self.regions != "auto":
            out["regions"] = self.regions
        return out

    def to_yaml(self) -> str:
        """The plan as the text of a plan file; `load_plan` of that file equals this plan."""
        from meshplan.plan.yaml_io import dump_plan

        return dump_plan(self)

    @classmethod
    def from_yaml(cls, text: str, file: str = "<string>") -> Plan:
        """A plan from the text of a plan file; errors name `file`."""
        from meshplan.plan.yaml_io import parse_plan

        return parse_plan(text, file)

    @classmethod
    def from_annotations(
        cls, model: nn.Module, *, mesh: Mapping[str, int], inputs: Mapping[str, Any] | None = None, **sections: Any
    ) -> Plan:
        """The plan that `place` wrote onto the modules of `model`: one rule for each annotated module.

        Arguments are those of `Plan`. Raises PlanError `no-annotations` for a model without any.
        """
        from meshplan.plan.annotate import rules_of

        return cls(mesh=dict(mesh), inputs=dict(inputs or {}), rules=rules_of(model), **sections)

    @classmethod
    def from_tp_plan(
        cls, model: nn.Module, *, mesh: Mapping[str, int], inputs: Mapping[str, Any] | None = None, **sections: Any
    ) -> Plan:
        """The plan that a transformers model's own tensor-parallel table means, as explicit rules.

        Arguments are those of `Plan`. Raises PlanError: `no-tp-plan`, `unknown-style`, `experts-style`,
        `no-such-module`; see `meshplan.plan.from_tp_plan`.
        """
        from meshplan.plan.from_tp_plan import rules_of

        experts = section_from(Experts, sections.get("experts"), user_source())
        owned = experts.at if experts is not None else ()
        return cls(mesh=dict(mesh), inputs=dict(inputs or {}), rules=rules_of(model, experts=owned), **sections)

    def adapted(self, model: nn.Module) -> Plan:
        """This plan, written for the model without adapters, as it reads for `model`, which PEFT put some in.

        See `meshplan.plan.adapters`. Raises PlanError `no-such-module` and those of the shorthands."""
        from meshplan.plan.adapters import adapted

        return adapted(self, model)


def as_regions(value: Any, source: Source | None = None) -> str:
    """`value` as one of `REGIONS`. Raises PlanError `unknown-option`."""
    as_choice("regions", value, REGIONS, source or user_source())
    return str(value)


def _mesh(value: Any, source: Source) -> dict[str, int]:
    mesh = dict(as_mapping("mesh", value, source))
    for axis, degree in mesh.items():
        at = source.child(axis)
        if axis not in AXES:
            hint = nearest_word(axis, AXES)
            if axis == "dp":
                hint = "; write dp_shard (parameters sharded) or dp_replicate (parameters replicated)"
            elif axis in ("ep", "etp"):
                hint = "; it is a view of the other axes, set in the `experts` section"
            raise PlanError(
                f"{axis!r} is not a mesh axis{hint}", code="unknown-axis", where=at.key_where, legal=list(AXES)
            )
        if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != -1):
            raise PlanError(
                f"mesh axis {axis} has degree {degree!r}",
                code="bad-degree",
                where=at.where,
                legal="a positive integer, or -1 on one axis for whatever is left",
            )
    free = [axis for axis, degree in mesh.items() if degree == -1]
    if len(free) > 1:
        raise PlanError(
            f"mesh axes {' and '.join(free)} are both -1",
            code="mesh-size",
            where=source.child(free[1]).where,
            legal="-1 on one axis at most",
        )
    return mesh
