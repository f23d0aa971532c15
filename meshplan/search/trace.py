"""The run on fake tensors that the planner reads: the unmodified model, equal layers once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.bind import Bound, bind
from meshplan.compiler.capture import capture
from meshplan.compiler.compile import fake_inputs
from meshplan.compiler.examples import example_inputs
from meshplan.compiler.experts import ExpertsAt
from meshplan.compiler.foldable import foldable
from meshplan.compiler.kinds import Kind
from meshplan.compiler.repeats import Equals, FullTraceNeeded
from meshplan.compiler.skeleton import fake_copy, preparing
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.plan import Plan
from meshplan.search.program import Program, program_of


@dataclass(frozen=True)
class Traced:
    """A program, with the model's input tensors by key."""

    program: Program
    inputs: dict[str, Tensor]


def traced(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], mode: Any, spec: MeshSpec) -> Traced:
    """Trace `model` on its global `inputs`. Raises PlanError as lowering does where a program cannot be traced."""
    bound = bind(plan, model, given=tuple(inputs))
    bound, routed = ExpertsAt.of(bound, model, spec)
    with preparing(routed.put if routed else None):
        return _traced(model, bound, inputs, mode)


def _traced(model: nn.Module, bound: Bound, inputs: Mapping[str, Any], mode: Any) -> Traced:
    unplaced: dict[str, list[Kind]] = {name: [] for name in bound.params}
    examples = example_inputs(model, bound, inputs, {})
    for folding in (lambda: foldable(model, mode, bound, unplaced, fake_inputs(examples, mode, None)), dict):
        equals = Equals(model, folding())
        empty = fake_copy(model, mode, None, equals.hollow)
        names, buffers = [name for name, _ in empty.named_parameters()], len(list(empty.buffers()))
        fakes = fake_inputs(examples, mode, None)
        try:
            _, trace = capture(partial(fake_copy, model, mode, None, equals.hollow), mode, fakes, equals)
            break
        except FullTraceNeeded:
            continue
    tensors = {
        leaf.key: t
        for name, example in examples.items()
        for leaf, t in zip(example.leaves, compat.flatten(fakes[name])[0], strict=True)
        if isinstance(t, Tensor)
    }
    numbered = {id(t): v for v, t in enumerate(trace.values[: len(names) + buffers + len(tensors)])}
    given = [(key, numbered[id(t)]) for key, t in tensors.items() if id(t) in numbered]
    return Traced(program_of(trace, model, names, given), tensors)
