"""Where a program's attention is by flex_attention, and where that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshplan.compiler.bind import Bound
from meshplan.compiler.capture import Trace
from meshplan.compiler.repeats import moved_path
from meshplan.errors import PlanError
from meshplan.ops.attention.flex import flex_call


def flexed(trace: Trace, repeats: Sequence[tuple[str, str]]) -> frozenset[str]:
    """The modules in whose own code flex_attention is called. `repeats`: modules that were not traced, each with its equal."""
    found = {call.module for call in trace.calls if call.func is flex_call}
    for new, old in repeats:
        found |= {moved for path in found if (moved := moved_path(path, old, new)) is not None}
    return frozenset(found)


def refuse_compiled_flex(bound: Bound, flex: Iterable[str]) -> None:
    """Raise PlanError `flex-attention` for a call in a unit that torch is to compile: what stands for it on a rank would be
    looked for while torch traces."""
    section = bound.plan.compile
    if section is None:
        return
    for path in sorted(flex):
        unit = bound.compile_unit_of(path)
        if unit is not None:
            raise PlanError(
                f"{path or 'the model'} calls flex_attention, and {unit or 'the model'} is compiled",
                code="flex-attention", module=path, where=section.source.where,
                legal="units to compile that have no flex_attention in them; torch.compile(flex_attention) in the model is fine",
            )  # fmt: skip
