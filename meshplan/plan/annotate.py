"""Annotations: the same words as a rule, written onto a module in the model's own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.layouts import Layout
from meshplan.plan.names import names_of
from meshplan.plan.rules import Rule
from meshplan.plan.source import user_source
from meshplan.plan.values import nearest_word

AnyModule = TypeVar("AnyModule", bound=nn.Module)

ATTRIBUTE = "_meshplan_rule"
"""Plain attribute of an annotated module. A plain object in `__dict__` is copied and pickled with the module, and is no
part of its state dict."""


def place(
    module: AnyModule,
    *,
    input: Mapping[Any, Any] | None = None,
    output: Mapping[Any, Any] | None = None,
    **params: Mapping[str, Any],
) -> AnyModule:
    """Say where a module's parameters and boundary tensors live; nothing changes on one device.

    Arguments:
        input, output: as in `Rule`: `{axis: placement}`, or that by tensor name or index.
        params: layout by the name of a parameter of the module: `weight={"tp": S(0)}`.

    Returns the module, so that an annotation can stand around its construction:
    `self.up = mp.place(nn.Linear(8, 16), weight={"tp": mp.S(0)})`. `Plan.from_annotations` collects them.

    Raises PlanError: `no-such-parameter`, `two-rules` when an earlier `place` said the same thing, and those of `Rule`.
    """
    source = user_source()
    own = dict(module.named_parameters())
    for name in params:
        if name not in own:
            raise PlanError(
                f"{type(module).__name__} has no parameter {name!r}{nearest_word(name, own)}",
                code="no-such-parameter",
                where=source.where,
                legal=list(own) or "a module with parameters",
            )
    rule = Rule("", params=dict(params), input=input, output=output, source=source)
    before: Rule | None = module.__dict__.get(ATTRIBUTE)
    setattr(module, ATTRIBUTE, rule if before is None else _both(before, rule))
    return module


def annotation(module: nn.Module) -> Rule | None:
    """What `place` said of this module, as a rule at the empty path, or None."""
    return module.__dict__.get(ATTRIBUTE)


def rules_of(model: nn.Module) -> tuple[Rule, ...]:
    """One rule for each annotated module of `model`, in module order; a shared module has one, at its first name.

    Raises PlanError `no-annotations` for a model without any.
    """
    rules = []
    for entry in names_of(model).modules:
        rule = annotation(entry.module)
        if rule is not None:
            rules.append(replace(rule, at=entry.name))
    if not rules:
        raise PlanError(
            f"no module of this {type(model).__name__} is annotated",
            code="no-annotations",
            where=user_source().where,
            legal="place(module, weight={'tp': S(0)}) on at least one module",
        )
    return tuple(rules)


def _both(before: Rule, after: Rule) -> Rule:
    return replace(
        after,
        params=_merged("parameter", before, after, before.params, after.params),
        input=_merged("input", before, after, before.input, after.input),
        output=_merged("output", before, after, before.output, after.output),
    )


def _merged(what: str, before: Rule, after: Rule, old: dict[str, Layout], new: dict[str, Layout]) -> dict[str, Layout]:
    out = {name: dict(layout) for name, layout in old.items()}
    for name, layout in new.items():
        for axis, placement in layout.items():
            if axis in out.get(name, {}):
                raise PlanError(
                    f"{what} {name!r} has two placements on {axis}: {out[name][axis]} ({before.where}) and {placement}",
                    code="two-rules",
                    where=after.where,
                    legal="one place() for each thing on each axis",
                )
            out.setdefault(name, {})[axis] = placement
    return out
