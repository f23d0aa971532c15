"""The refusal of second derivatives by operators whose backward is written by hand."""

from __future__ import annotations

import torch

from meshplan.errors import PlanError


def require_first(operator: str) -> None:
    """Called first in the backward of an `autograd.Function`: PlanError `second-derivative` under `create_graph`.

    Autograd would otherwise take what forward kept for constants, and a gradient penalty would lose terms in silence;
    `once_differentiable` notices only where the incoming gradient itself needs a gradient. Compiled backwards refuse
    second derivatives on their own.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise PlanError(
            f"a second derivative of the distributed {operator} was asked for (create_graph=True)",
            code="second-derivative",
            legal="backward without create_graph",
        )
