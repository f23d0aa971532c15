"""The `experts` section of a derived plan: which modules of a model are experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshplan.compiler.bind import bind
from meshplan.compiler.experts_found import experts_in
from meshplan.errors import PlanError
from meshplan.plan.patterns import generic
from meshplan.plan.plan import Plan
from meshplan.plan.sections import Experts


def experts_section(model: nn.Module, given: Mapping[str, Any] | None) -> Experts | None:
    """The plan's `experts` section: `given`, with every experts module of `model` for `at` where that is left out.

    Raises PlanError `experts-not-found` where there is none.
    """
    if given is None:
        return None
    if "at" not in given:
        found = dict.fromkeys(generic(f.path) for f in experts_in("", model, bind(Plan(mesh={}), model)))
        if not found:
            raise PlanError(
                "the model has no module that takes (tokens, indices, weights) and holds as many equal parts of parameters, and "
                "none with a router beside a list of modules that are alike",
                code="experts-not-found", legal="`at`: the modules that are experts",
            )  # fmt: skip
        given = {"at": tuple(found), **given}
    return Experts(**given)
