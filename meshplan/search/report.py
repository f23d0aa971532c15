"""What a derived plan says of itself: modelled communication with its bound, parameter bytes, and what stays whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan.compiler.kinds import replicated
from meshplan.mesh.spec import MeshSpec
from meshplan.report.units import bytes_text
from meshplan.search.program import Program

if TYPE_CHECKING:
    from meshplan.search.attempts import Attempt
    from meshplan.search.axis import Choice

LISTED = 12


def header(found: Attempt, spec: MeshSpec) -> str:
    """The comment above the plan."""
    lines = [f"Derived for {spec}. Counted: bytes; modelled: seconds; nothing here was measured."]
    choice = found.choice
    if choice is not None:
        lines.append(
            f"tp: {bytes_text(choice.cost.wire)} sent a rank and step (modelled; the lowered plan's collectives take "
            f"{1e3 * found.modelled:.3g} ms)."
        )
        lines.append(
            f"Step of {1e3 * choice.seconds:.4g} ms modelled, proved at least {1e3 * choice.bound:.4g} ms for these bounds: "
            f"gap {100 * choice.gap:.2g} % ({choice.size[1]} variables, {choice.size[0]} rows)."
        )
        whole = found.whole
        held = sum(n for _, n in whole)
        lines.append(
            f"Parameters: {bytes_text(choice.bytes)} a rank on tp. Whole on every rank: {bytes_text(held)} in matrices."
        )
        for name, nbytes in whole[:LISTED]:
            lines.append(f"  whole: {name}  {bytes_text(nbytes)}")
        if len(whole) > LISTED:
            lines.append(f"  and {len(whole) - LISTED} more")
    for error in found.refused:
        lines.append(f"  refused and worked around: {error.code} in {error.module or 'the model'}")
    return "\n".join(lines)


def kept_whole(program: Program, choice: Choice) -> list[tuple[str, int]]:
    """Parameters of two or more dims that every rank holds whole, the largest first, equal layers' together."""
    out = []
    for v, kind in choice.sources.items():
        value = program.values[v]
        if value.params and value.tensor.dim() > 1 and replicated(kind):
            name = value.params[0] + (f" and {len(value.params) - 1} like it" if len(value.params) > 1 else "")
            out.append((name, value.tensor.nbytes * len(value.params)))
    return sorted(out, key=lambda item: -item[1])
