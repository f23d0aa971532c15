"""`torch.compile` of units: inside recompute and the root's step, around everything else a unit does.

A checkpoint inside a compiled unit is no order torch can run (2.13 keeps a DeviceMesh among the saved tensors), and the
root's step reads signatures and draws keys in Python. So a unit that has either is compiled within it: what runs again
in backward is the compiled program. FSDP2's own hooks stand outside of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshplan.compiler.bind import Bound
from meshplan.errors import PlanError
from meshplan.plan.sections import Compile
from meshplan.runtime.module import Around


def refuse_inner_recompute(bound: Bound) -> None:
    """Raises PlanError `recompute-inside-compile` where a unit to compile holds a smaller one to recompute."""
    for outer in bound.compile_units:
        for inner in bound.recompute_units:
            if inner != outer and (outer == "" or inner.startswith(f"{outer}.")):
                section = bound.plan.compile
                raise PlanError(
                    f"{inner} is recomputed inside {outer or 'the model'}, which is compiled as one program",
                    code="recompute-inside-compile", where=section.source.where if section else None, module=inner,
                    legal=f"compile: {{units: [{inner}]}}, or recompute: {{units: [{outer or 'the model'}]}}",
                )  # fmt: skip


def compiled_arounds(bound: Bound, arounds: Mapping[str, Around]) -> dict[str, Around]:
    """`arounds`, those of units to compile with a compiled forward inside."""
    section = bound.plan.compile
    if section is None:
        return dict(arounds)
    return {
        path: _compiled_inside(around, section) if path in bound.compile_units else around
        for path, around in arounds.items()
    }


def compile_units(model: nn.Module, bound: Bound, arounds: Mapping[str, Around]) -> None:
    """Compile in place every unit that has nothing around it."""
    for path in bound.compile_units:
        if path not in arounds and bound.plan.compile is not None:
            model.get_submodule(path).compile(**_options(bound.plan.compile))


def _options(section: Compile) -> dict[str, Any]:
    return {"backend": section.backend, "fullgraph": section.fullgraph}


def _compiled_inside(around: Around, section: Compile) -> Around:
    made: Callable[..., Any] | None = None

    def compiled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal made
        if made is None:
            # Of `run`, a bound method, torch guards the structure and not the identity: equal layers share a program.
            made = torch.compile(run, **_options(section))
        return around(made, args, kwargs)

    return compiled
