"""What a choice is held to after a refusal: little by little more of the program stays whole, around what was named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshplan.errors import PlanError, Where
from meshplan.plan.patterns import generic, within
from meshplan.search.axis import Limits
from meshplan.search.program import Program


def stricter(program: Program, limits: Limits, error: PlanError) -> Limits | None:
    """The next stricter limits after `error`, or None where all that it could mean is whole already.

    In this order, in the module that it names (its equal layers too) and then in every module around it: the calls of the line
    that it names, what these take, the module's own calls, what enters it from outside, and the calls inside it. The whole model
    is never made whole so: that is no plan for it.
    """
    for module in _around(generic(error.module or "")):
        for calls, values in _steps(program, module, error.where):
            if calls - limits.calls or values - limits.values:
                return replace(limits, calls=limits.calls | calls, values=limits.values | values)
    return None


def _around(module: str) -> Iterator[str]:
    """A module's path and the paths around it; the model itself only where it was named."""
    yield module
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _steps(program: Program, module: str, where: Where | None) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Calls that run whole and values that are whole, one step stricter after the other."""
    none: frozenset[int] = frozenset()
    own = frozenset(n for n, node in enumerate(program.nodes) if generic(node.call.module) == module)
    if where is not None:
        line = frozenset(n for n in own if program.nodes[n].call.where == where)
        yield line, none
        # Code may have looked at a size before the call: at what it takes, wherever that was made.
        yield line, frozenset(v for n in line for v in program.nodes[n].ins if not program.values[v].params)
    yield own, none
    if module:
        yield own, _entering(program, module)
        yield frozenset(n for n, node in enumerate(program.nodes) if within(generic(node.call.module), module)), none


def _entering(program: Program, module: str) -> frozenset[int]:
    """Values, parameters apart, that calls in `module` take and calls elsewhere made."""
    found = set()
    for node in program.nodes:
        if within(generic(node.call.module), module):
            for v in node.ins:
                value = program.values[v]
                made = value.made
                if not value.params and (made is None or not within(generic(program.nodes[made[0]].call.module), module)):
                    found.add(v)
    return frozenset(found)
