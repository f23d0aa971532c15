"""Loss curves that should be one: as characters for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

MARKS = "ox+"
"""Marks of the series, in order."""
TOGETHER = "*"
"""The mark where every series has the same cell."""


def curves_text(series: Mapping[str, Sequence[float]], width: int = 72, height: int = 12, label: str = "loss") -> str:
    """Series of one length over their steps, as lines of at most `width` characters.

    A cell is marked with the series that pass through it, or with `*` where all do. Values lie within half a row of
    what they are: for curves that differ by less, see their difference.

    Raises ValueError for more series than there are marks, series that differ in length, or fewer than two steps.
    """
    steps = {len(values) for values in series.values()}
    if not 1 <= len(series) <= len(MARKS) or len(steps) != 1 or (length := steps.pop()) < 2:
        raise ValueError(f"expected 1 to {len(MARKS)} series of one length, at least 2 steps")
    low = min(min(values) for values in series.values())
    high = max(max(values) for values in series.values())
    scale = [f"{high - (high - low) * row / (height - 1):.2f}" for row in range(height)]
    gutter = max(map(len, scale))
    columns = min(length, width - gutter - 3)
    cells: dict[tuple[int, int], set[str]] = {}
    for mark, values in zip(MARKS, series.values(), strict=False):
        for column in range(columns):
            value = values[round(column * (length - 1) / max(columns - 1, 1))]
            row = round((high - value) / (high - low) * (height - 1)) if high > low else height - 1
            cells.setdefault((row, column), set()).add(mark)
    lines = [label]
    for row in range(height):
        # Every other row has a number: enough to read, and the eye finds the curve.
        number = scale[row] if row % 2 == 0 or row == height - 1 else ""
        marks = "".join(_mark(cells.get((row, column), set()), len(series)) for column in range(columns))
        lines.append(f"{number:>{gutter}} |{marks.rstrip()}" if marks.strip() else f"{number:>{gutter}} |")
    lines.append(f"{'':>{gutter}} +{'-' * columns}")
    lines.append(f"{'':>{gutter}}  1{f'step {length}':>{columns - 1}}")
    legend = [f"{mark} {name}" for mark, name in zip(MARKS, series, strict=False)]
    lines.append(f"{'':>{gutter}}  " + "   ".join(legend + ([f"{TOGETHER} all of them"] if len(series) > 1 else [])))
    return "\n".join(lines)


def _mark(marks: set[str], series: int) -> str:
    if len(marks) == series > 1:
        return TOGETHER
    return max(marks) if marks else " "


def curves_png(path: Path, series: Mapping[str, Sequence[float]], title: str) -> bool:
    """Write a PNG of the series over their steps and, below, how far each is from the first.

    Returns False, and writes nothing, where matplotlib is not installed.
    """
    try:
        # A figure without pyplot: no window, no display, and no backend chosen for the caller's own plots.
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    (name, first), *others = series.items()
    steps = range(1, len(first) + 1)
    # The others thin and dashed on a broad line, so that one seen through the other shows that both are there.
    top.plot(steps, first, label=name, color="C0", linewidth=6, alpha=0.4)
    for index, (other, values) in enumerate(others, 1):
        top.plot(steps, values, label=other, color=f"C{index}", linewidth=1.5, linestyle="--")
        apart = [abs(a - b) for a, b in zip(first, values, strict=True)]
        below.plot(steps, apart, label=f"|{other} - {name}|", color=f"C{index}")
    top.set(ylabel="loss", title=title)
    below.set(xlabel="step", ylabel="difference")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (top, below):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
