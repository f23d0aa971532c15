"""What a plan says of the model's inputs (`Input`) and of the modules at a path (`Rule`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from meshplan.errors import PlanError, Where
from meshplan.plan.layouts import (
    INPUT_AXES,
    Layout,
    as_layout,
    as_layouts,
    as_param_layout,
    layout_dict,
    layouts_dict,
)
from meshplan.plan.patterns import match
from meshplan.plan.placements import Partial, Shard
from meshplan.plan.source import Source, user_source
from meshplan.plan.values import (
    as_bool,
    as_choice,
    as_dtype,
    as_int,
    as_mapping,
    as_str,
    check_keys,
    dtype_name,
    placed,
    wrong,
)

SHORTHANDS = ("colwise", "rowwise", "embedding", "vocab_head", "sequence")
"""Words for `use`; `meshplan.plan.shorthands` says what each abbreviates."""


@dataclass(frozen=True)
class Input:
    """One input of the model, global: the sizes are those of the whole batch, over all ranks.

    Attributes:
        shape: global sizes, or None where example inputs are given to `parallelize`.
        dtype: torch dtype or its bare name; None as above.
        place: placement by axis, S or R; `dp` is dp_replicate x dp_shard.
        offsets: the input whose sequence this one cuts into documents: where each begins, and where the last ends (`cu_seqlens`).
            Ranks look at its values at each call, and refuse others together, before anything is sent.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    place: Layout = field(default_factory=dict)
    offsets: str | None = None
    source: Source = field(default_factory=user_source, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        here = self.source
        if self.shape is not None:
            at = here.child("shape")
            if not isinstance(self.shape, list | tuple):
                raise wrong("an input's shape", self.shape, at, "a list of sizes, such as [8, 2048]")
            sizes = tuple(as_int(f"shape[{i}] of an input", n, at.child(i)) for i, n in enumerate(self.shape))
            object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", as_dtype("an input's dtype", self.dtype, here.child("dtype")))
        place = as_layout("an input", self.place, here.child("place"), INPUT_AXES)
        object.__setattr__(self, "place", place)
        for axis, placement in place.items():
            if isinstance(placement, Partial):
                raise PlanError(
                    f"an input cannot be P on {axis}: the caller holds a value, not a summand",
                    code="partial-input",
                    where=here.child("place", axis).where,
                    legal="S(<dim>) or R",
                )
        if "dp" in place and (twice := [axis for axis in ("dp_replicate", "dp_shard") if axis in place]):
            raise PlanError(
                f"an input is placed on dp and on {twice[0]}, which is a part of dp",
                code="two-layouts",
                where=here.child("place", twice[0]).key_where,
                legal="either dp, or dp_replicate and dp_shard",
            )

        if self.offsets is not None:
            as_str("an input's offsets", self.offsets, here.child("offsets"))
            integers = self.dtype in (None, torch.int32, torch.int64)
            if not integers or len(self.shape or (2,)) != 1 or any(isinstance(p, Shard) for p in place.values()):
                raise wrong(
                    "an input of offsets", self.to_dict(), here, "int32 or int64 [documents + 1], whole on every rank"
                )

    @classmethod
    def from_dict(cls, value: Any, source: Source | None = None) -> Input:
        """An `Input` from the mapping of a plan file; an `Input` is returned as it is."""
        if isinstance(value, Input):
            return value
        source = source or user_source()
        check_keys("an input", as_mapping("an input", value, source), ("shape", "dtype", "place", "offsets"), source)
        return cls(**value, source=source)

    def to_dict(self) -> dict[str, Any]:
        """The mapping of a plan file, without what is left to its default."""
        out: dict[str, Any] = {}
        if self.dtype is not None:
            out["dtype"] = dtype_name(self.dtype)
        if self.shape is not None:
            out["shape"] = list(self.shape)
        if self.place:
            out["place"] = layout_dict(self.place)
        if self.offsets is not None:
            out["offsets"] = self.offsets
        return out


@dataclass(frozen=True)
class Rule:
    """Where the parameters and the boundary tensors of the modules at one path live. What it leaves out is inferred.

    Attributes:
        at: module path pattern; `""` is the model itself.
        params: layout by parameter name; a dotted name is a parameter of a submodule.
        input: layout by argument name, index or key path; under `""` the first argument. Written in the bare form
            `{"tp": S(1)}` it is kept as `{"": {"tp": S(1)}}`.
        output: likewise by index or key path; under `""` every tensor the module returns.
        use: a shorthand, resolved against the module at bind; what the rule itself says comes before it.
        override: this rule may replace what an earlier rule said.
        note: why, for who reads the plan; a plan file has it as a comment.
    """

    at: str
    params: dict[str, Layout] = field(default_factory=dict)
    input: dict[str, Layout] = field(default_factory=dict)
    output: dict[str, Layout] = field(default_factory=dict)
    use: str | None = None
    override: bool = False
    note: str = field(default="", compare=False, repr=False, kw_only=True)
    source: Source = field(default_factory=user_source, compare=False, repr=False, kw_only=True)

    if TYPE_CHECKING:
        # What may be given is wider than what is kept.
        def __init__(
            self,
            at: str,
            params: Mapping[str, Mapping[str, Any]] = ...,
            input: Mapping[Any, Any] | None = ...,
            output: Mapping[Any, Any] | None = ...,
            use: str | None = None,
            override: bool = False,
            *,
            note: str = ...,
            source: Source = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        here = self.source
        as_str("a rule's `at`", self.at, here.child("at"))
        with placed(here.child("at")):
            match(self.at, ())
        params = {}
        for name, layout in as_mapping("params", self.params or {}, here.child("params")).items():
            at = here.child("params", name)
            params[as_str("a parameter's name", name, at)] = as_param_layout(f"parameter {name!r}", layout, at)
        object.__setattr__(self, "params", params)
        object.__setattr__(self, "input", as_layouts("input", self.input, here.child("input")))
        object.__setattr__(self, "output", as_layouts("output", self.output, here.child("output")))
        if self.use is not None:
            as_choice("use", self.use, SHORTHANDS, here.child("use"))
        as_bool("override", self.override, here.child("override"))
        if not (self.params or self.input or self.output or self.use):
            raise PlanError(
                f"the rule at {self.at!r} says nothing",
                code="empty-rule",
                where=here.where,
                legal="at least one of params, input, output and use",
            )

    @property
    def where(self) -> Where | None:
        """The place the rule was written at."""
        return self.source.where

    @classmethod
    def from_dict(cls, value: Any, source: Source | None = None) -> Rule:
        """A `Rule` from the mapping of a plan file; a `Rule` is returned as it is."""
        if isinstance(value, Rule):
            return value
        source = source or user_source()
        as_mapping("a rule", value, source)
        check_keys("a rule", value, ("at", "params", "input", "output", "use", "override"), source)
        if "at" not in value:
            raise PlanError("a rule lacks `at`", code="missing-key", where=source.where, legal="at: <module path>")
        return cls(**value, source=source)

    def to_dict(self) -> dict[str, Any]:
        """The mapping of a plan file, without what is left to its default."""
        out: dict[str, Any] = {"at": self.at}
        if self.use is not None:
            out["use"] = self.use
        if self.params:
            out["params"] = {name: layout_dict(layout) for name, layout in self.params.items()}
        if self.input:
            out["input"] = layouts_dict(self.input)
        if self.output:
            out["output"] = layouts_dict(self.output)
        if self.override:
            out["override"] = True
        return out


def rules_from(value: Any, source: Source) -> tuple[Rule, ...]:
    """The `rules` of a plan: a list of rules or of their mappings."""
    if not isinstance(value, list | tuple):
        raise wrong("rules", value, source, "a list of rules")
    return tuple(Rule.from_dict(item, source.child(i)) for i, item in enumerate(value))


def inputs_from(value: Any, source: Source) -> dict[str, Input]:
    """The `inputs` of a plan: by argument name, or by key path into an argument."""
    items: Mapping[Any, Any] = as_mapping("inputs", value, source)
    return {
        as_str("an input's name", name, source.child(name)): Input.from_dict(item, source.child(name))
        for name, item in items.items()
    }
