"""Two lowered programs side by side: what moves more, by axis and by module, layers taken together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshplan.report.fold import star
from meshplan.report.rows import link_of
from meshplan.report.text import grid, mesh_text, render
from meshplan.report.units import bytes_text, plain

_FIGURES = ("bytes", "wire_bytes", "calls")


def diff_json(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Per-step communication of `b` against `a`, both dicts of `Lowered.to_json()`.

    Returns `{"a", "b": {"model", "mesh", "world_size"}, "total", "axes", "modules", "placements"}`. An entry of `axes`
    is `{"axis", "a": {"bytes", "wire_bytes", "calls", "routed"}, "b": ..., "change": ...}`; one of `modules` has
    `module` (indices as `*`) and `axis`. Both are sorted by the size of the change in bytes; `modules` leaves equal
    ones out. Calls whose bytes routing decides are told as `routed` and add no bytes. `placements` lists parameters
    whose layout differs, `{"name", "a": layout or None, "b": ...}`, equal layers once.
    """
    axes = _compare(a, b, lambda c: (c["axis"],))
    modules = _compare(a, b, lambda c: (star(c["module"]), c["axis"]))
    left, right = _layouts(a), _layouts(b)
    return {
        "a": _side(a),
        "b": _side(b),
        "total": _entry({}, _compare(a, b, lambda c: ())),
        "axes": [_entry({"axis": key[0]}, {key: v}) for key, v in axes.items()],
        "modules": [_entry({"module": key[0], "axis": key[1]}, {key: v}) for key, v in modules.items() if v[0] != v[1]],
        "placements": [
            {"name": name, "a": left.get(name), "b": right.get(name)}
            for name in dict.fromkeys([*left, *right])
            if left.get(name) != right.get(name)
        ],
    }


def diff_text(a: Mapping[str, Any], b: Mapping[str, Any], width: int = 100, color: bool = False) -> str:
    """`diff_json` as tables, at most `width` cells wide."""
    found = diff_json(a, b)
    parts: list[RenderableType] = [
        Text(plain(f"A  {mesh_text(a)}  {a['model']}, {a['world_size']} ranks"), style="bold"),
        Text(plain(f"B  {mesh_text(b)}  {b['model']}, {b['world_size']} ranks"), style="bold"),
        Text("bytes a step, counted from the programs (full tensor of each call)", style="dim"),
        "",
    ]
    columns = (("A", "right"), ("B", "right"), ("change", "right"), ("calls", "right"), ("a rank sends", "right"))
    table = grid(("axis", ""), ("link A / B", ""), *columns)
    for e in found["axes"]:
        links = " / ".join(link_of(d, e["axis"]) if e[s]["calls"] else "-" for d, s in ((a, "a"), (b, "b")))
        table.add_row(Text(plain(e["axis"])), links, *_cells(e))
    table.add_row("all", "", *_cells(found["total"]), style="bold")
    parts.append(table)
    if found["modules"]:
        table = grid(("module", ""), ("axis", ""), *columns)
        for e in found["modules"]:
            table.add_row(Text(plain(e["module"] or "(the model itself)")), Text(plain(e["axis"])), *_cells(e))
        parts += ["", table]
    else:
        parts += ["", "no module moves more or less"]
    if found["placements"]:
        table = grid(("parameter", ""), ("A", ""), ("B", ""))
        for p in found["placements"]:
            table.add_row(*(Text(plain(c or "-")) for c in (p["name"], p["a"], p["b"])))
        parts += ["", table]
    return render(parts, width, color)


def _cells(e: Mapping[str, Any]) -> list[str]:
    a, b, change = e["a"], e["b"], e["change"]
    routed = " + routed" if a.get("routed") or b.get("routed") else ""
    return [
        bytes_text(a["bytes"]),
        bytes_text(b["bytes"]) + routed,
        _signed(change["bytes"]),
        f"{a['calls']} -> {b['calls']}",
        _signed(change["wire_bytes"]),
    ]


def _signed(n: int) -> str:
    return "=" if n == 0 else ("+" if n > 0 else "") + bytes_text(n)


Figures = dict[str, int]
Pairs = dict[tuple[str, ...], tuple[Figures, Figures]]


def _compare(a: Mapping[str, Any], b: Mapping[str, Any], key: Callable[[Mapping[str, Any]], tuple[str, ...]]) -> Pairs:
    """Sums of both programs by `key`, the largest change in bytes first."""
    out: Pairs = {}
    for side, d in enumerate((a, b)):
        for c in d["collectives"]:
            pair = out.setdefault(key(c), ({}, {}))[side]
            times = c.get("count") or 1
            for figure, amount in (
                ("bytes", c["bytes"] or 0),
                ("wire_bytes", c["wire_bytes"] or 0),
                ("calls", 1),
                ("routed", int(c["bytes"] is None)),
            ):
                pair[figure] = pair.get(figure, 0) + amount * times
    order = sorted(out.items(), key=lambda item: -abs(item[1][1].get("bytes", 0) - item[1][0].get("bytes", 0)))
    return dict(order)


def _entry(head: dict[str, str], pairs: Pairs) -> dict[str, Any]:
    """`pairs` holds one pair, or none where neither program communicates."""
    left, right = next(iter(pairs.values()), ({}, {}))
    a, b = ({f: side.get(f, 0) for f in (*_FIGURES, "routed")} for side in (left, right))
    return {**head, "a": a, "b": b, "change": {f: b[f] - a[f] for f in _FIGURES}}


def _side(d: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": d["model"], "mesh": dict(d["mesh"]), "world_size": d["world_size"]}


def _layouts(d: Mapping[str, Any]) -> dict[str, str]:
    """Starred parameter name -> its layout; layers that differ are joined by ` or `."""
    found: dict[str, dict[str, None]] = {}
    for p in d["placements"]:
        layout = ", ".join(f"{axis}: {placement}" for axis, placement in p["layout"].items())
        found.setdefault(star(p["name"]), {})[layout or "plain"] = None
    return {name: " or ".join(layouts) for name, layouts in found.items()}
