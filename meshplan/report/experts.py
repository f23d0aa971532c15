"""What `explain` prints of experts above the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from meshplan.report.units import bytes_text


def experts_lines(e: Mapping[str, Any], verbose: int) -> list[str]:
    """The view of the ranks, and lines for each kind of module."""
    lent = ", ".join(f"{axis} {n}" for axis, n in e["borrowed"].items()) or "nothing"
    view = " x ".join(f"{name} {n}" for name, n in e["view"].items())
    kinds = Counter((m["experts"], m["held"], m["bytes"], m["held_bytes"]) for m in e["modules"])
    sends = {(m["experts"], m["held"], m["bytes"], m["held_bytes"]): m["sends"] for m in e["modules"]}
    lines = [f"experts: {view}, ep borrows {lent}, dispatch {e['dispatch']}"]
    for kind, number in kinds.items():
        experts, held, whole, mine = kind
        each = f"{number} module{'s' * (number != 1)} of {experts} experts, {bytes_text(whole)} each"
        lines.append(f"  {each}: a rank holds {held} of them, {bytes_text(mine)} of the parameters")
        lines += _dispatches(sends[kind], verbose)
    return lines


def _dispatches(s: Mapping[str, Any] | None, verbose: int) -> list[str]:
    """What each way to dispatch tokens would send; opened, with formulas."""
    if s is None:
        return []
    shown = ", ".join(
        f"{name} {bytes_text(m['bytes'])}" + (" (used)" if m["used"] else "") for name, m in s["methods"].items()
    )
    lines = [f"    its busiest rank sends forward (modelled, imbalance {s['imbalance']:g}): {shown}"]
    if verbose:
        inner = "" if s["inner"] is None else f", I {s['inner']}, O {s['ranks'] // s['inner']}"
        numbers = f"T {s['tokens']}, k {s['k']}, H {s['width']}, b {s['bytes']}, W {s['ranks']}, i {s['imbalance']:g}{inner}"
        lines += [f"      {numbers}", *(f"      {name}: {m['formula']}" for name, m in s["methods"].items())]
    return lines
