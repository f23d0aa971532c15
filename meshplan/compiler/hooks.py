"""Hooks of the user's own: those on gradients are refused, those around a forward are traced as code of no module.

A hook on gradients is handed what this rank has of one: a shard, a summand, or its share times the number of data ranks. It
is Python code, so what it would do with the whole cannot be known. A forward hook is run by the module's call, outside its
forward, where nothing is edited: what it computes must be right on shards as it stands.
"""

from __future__ import annotations

from torch import nn

from meshplan import compat
from meshplan.errors import PlanError, Where

ON_TENSORS = ("register_hook", "register_post_accumulate_grad_hook")
"""Calls by which a forward hooks the gradient of one of its tensors."""


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raises PlanError `gradient-hook` if a module or a parameter of `model` has a hook on its gradient."""
    for path, module in model.named_modules():
        if any(compat.hook_tables(module, True)):
            raise gradient_hook(f"{type(module).__name__} has a backward hook, which", path)
    for name, p in model.named_parameters():
        if any(compat.hook_tables(p, True)):
            raise gradient_hook(f"parameter {name} has a hook, which", name.rpartition(".")[0])


def gradient_hook(what: str, module: str, where: Where | None = None) -> PlanError:
    """The refusal of a hook on a gradient that no rank has whole."""
    return PlanError(
        f"{what} would be handed this rank's part of a gradient", code="gradient-hook", where=where, module=module,
        legal="no hook: read p.grad after backward, clip with meshplan.clip_grad_norm_, scale with x * a + x.detach() * (1 - a)",
    )  # fmt: skip


def forward_hook(call: str, module: str, where: Where | None) -> PlanError:
    """The refusal of a forward hook whose result on shards is not the single device's."""
    return PlanError(
        f"{call} in a forward hook would have to be redistributed or replaced on a rank, and outside a forward no call is",
        code="forward-hook", where=where, module=module, legal="the hook's code in the forward of a module",
    )  # fmt: skip
