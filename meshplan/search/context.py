"""Sequences over cp: which inputs have one, and which attention runs over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshplan.compiler.lowered_graph import Lowered
from meshplan.compiler.rules.semantic import OVER
from meshplan.errors import PlanError
from meshplan.lowering.lower import lower
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.patterns import generic
from meshplan.plan.plan import Plan
from meshplan.plan.sections import Context
from meshplan.search.trace import Traced


def sequence_inputs(inputs: Mapping[str, Tensor], spec: MeshSpec) -> set[str]:
    """The inputs that have the sequence as dim 1: the first input of two dims has it, and every other whose dim 1 is as long.
    None where cp has one rank or does not divide it."""
    n = spec.degree("cp")
    sizes = {key: t.shape[1] for key, t in inputs.items() if t.dim() > 1}
    length = next(iter(sizes.values()), 1)
    return {key for key, size in sizes.items() if size == length} if n > 1 and length % n == 0 else set()


def over_context(
    base: Plan, model: nn.Module, program: Traced, given: Mapping[str, Any], spec: MeshSpec, section: Mapping[str, Any] | None
) -> tuple[Plan, Lowered | None]:
    """`base` with a `context` section for attention over the sequence that cp splits: `section`, or else a ring, in zigzag order
    where the length allows it; and what that lowers to, where it had to be tried. What turns out to be attention over something
    else is left out."""
    split = sequence_inputs(program.inputs, spec)
    if not split:
        return base, None
    length = program.inputs[next(iter(split))].shape[1]
    if section is not None:
        return replace(base, context=Context(**section)), None
    found = dict.fromkeys(generic(node.call.module) for node in program.program.nodes if _over(node.call, program, length))
    balance = "zigzag" if length % (2 * spec.degree("cp")) == 0 else "contiguous"
    paths = list(found)
    while paths:
        plan = replace(base, context=Context(attention=tuple(paths), method="ring", balance=balance))
        try:
            return plan, lower(model, plan, spec.world_size, given)
        except PlanError as error:
            if error.code != "context-unused":
                raise
            paths.remove(generic(error.module or ""))
    return base, None


def _over(call: Any, program: Traced, length: int) -> bool:
    """Whether a call is self attention of a sequence of `length`."""
    if call.func not in OVER:
        return False
    q, k = (program.program.trace.values[v] for v in call.ins[:2])
    return q.dim() == 4 and q.shape[-2] == k.shape[-2] == length
