"""The lowered program as one table that reads at a glance; `verbose` opens its lines. Every figure says what it is."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshplan.report.experts import experts_lines
from meshplan.report.fold import fold, star
from meshplan.report.rows import Call, Row, Sum, axis_sums, link_of, rows
from meshplan.report.units import bytes_text, dtype_text, layout_text, plain, short_placement, tensor_text


def explain_text(d: Mapping[str, Any], verbose: int = 0, width: int = 100, color: bool = False) -> str:
    """`Lowered.to_json()` as text.

    Arguments:
        d: the dict of `Lowered.to_json()`.
        verbose: 1 adds to each line its tensor, axis, wire bytes and source line, and lists placements, rules, formulas
            and conditions; 2 also lists the boundaries that move nothing.
        width: no line is wider, in terminal cells.
        color: emit ANSI colours.
    """
    parts: list[RenderableType] = [*_head(d, verbose), "", _collectives(d, verbose), "", *_totals(d)]
    if verbose:
        parts += _details(d, verbose)
    parts += _remarks(d)
    return render(parts, width, color)


def render(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """Rich renderables as text without trailing blanks, at most `width` cells wide."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for part in parts:
        console.print(part, overflow="fold")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def grid(*columns: tuple[str, str], gap: int = 2) -> Table:
    """A table without lines; each column is (title, justify), long cells are folded."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", expand=False)
    for title, justify in columns:
        table.add_column(title, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def mesh_text(d: Mapping[str, Any]) -> str:
    """`dp_shard 2 x tp 4`, axes of one rank left out."""
    return " x ".join(f"{axis} {n}" for axis, n in d["mesh"].items() if n > 1) or "1 rank"


def _head(d: Mapping[str, Any], verbose: int) -> list[RenderableType]:
    world, node = d["world_size"], d["node_size"]
    nodes = -(-world // node)
    facts = [
        plain(d["model"]),
        plain(" + ".join([mesh_text(d), *filter(None, [d.get("context")])])),
        f"{world} rank{'s' * (world != 1)} on {nodes} node{'s' * (nodes != 1)}",
        "bytes counted from the program",
    ]
    lines: list[RenderableType] = [Text("   ".join(facts), style="bold")]
    for name, spec in d.get("inputs", {}).items():
        tensor = tensor_text(spec["dtype"], spec["shape"], spec["place"])
        lines.append(Text(plain(f"input {name}: {tensor}"), style="dim"))
    if d.get("experts"):
        lines += [Text(plain(line), style="dim") for line in experts_lines(d["experts"], verbose)]
    return lines


def _collectives(d: Mapping[str, Any], verbose: int) -> RenderableType:
    found = rows(d)
    if not found:
        return Text("no collectives: every rank computes alone")
    table = grid(("module", ""), ("in -> out", ""), ("forward", ""), ("backward", ""), ("per step", "right"), gap=2)
    table.columns[-1].no_wrap = True
    _add(table, [(row.module, row) for row in found], d, 0, 1, verbose)
    return table


def _add(
    table: Table, items: Sequence[tuple[str, Row]], d: Mapping[str, Any], indent: int, repeat: int, verbose: int
) -> None:
    """Add the rows of `items`, folded; `repeat` is how many modules the enclosing label stands for."""
    for group in fold(items, lambda row: row.alike):
        if not group.label:
            for path, row in group.items:
                _add_row(table, path, row, indent, repeat, verbose)
            continue
        # The first of the folded modules stands for all; what it is at the top, it is inside.
        region = _region(d, group.items[0][1].module, group.items[0][0])
        label = group.label + (f"  x{group.count}" if group.count > 1 else "") + (f"  {region}" if region else "")
        table.add_row(_indented(label, indent, "bold"))
        _add(table, group.items, d, indent + 1, repeat * group.count, verbose)


def _add_row(table: Table, path: str, row: Row, indent: int, repeat: int, verbose: int) -> None:
    label = " ".join(s for s in (path, row.what) if s) or row.tensor
    backward = _calls(row.of("backward"))
    optimizer = _calls(row.of("optimizer"))
    if optimizer:
        backward = "\n".join(s for s in (backward, optimizer + " (optimizer)") if s)
    table.add_row(
        _indented(label, indent),
        Text(plain(f"{short_placement(row.layout)} {row.axis}") + (" (implicit)" if row.implicit else "")),
        Text(_calls(row.of("forward")) or "-"),
        Text(backward or "-"),
        Text(str(row.step.times(repeat))),
    )
    if verbose:
        _add_opened(table, row, indent)


def _add_opened(table: Table, row: Row, indent: int) -> None:
    """Under a row: its tensor and source line, and for each phase the elements and the bytes that one rank sends."""
    cells = []
    for phase in ("forward", "backward"):
        held = row.of(phase) + (row.of("optimizer") if phase == "backward" else ())
        cells.append("\n".join(_opened(call) for call in held))
    source = row.tensor + (f"  {row.where}" if row.where else "")
    table.add_row(_indented(source, indent + 1, "dim"), "", *(Text(c, style="dim") for c in cells))


def _opened(call: Call) -> str:
    if call.elements is None or call.wire is None:
        return f"{dtype_text(call.dtype)}, size by routing"
    return f"{call.elements:,} {dtype_text(call.dtype)}\nsends {bytes_text(call.wire)}"


def _indented(text: str, depth: int, style: str = "") -> Padding:
    # Padding and not blanks, so that a folded label stays under its beginning.
    return Padding(Text(plain(text), style=style), (0, 0, 0, 2 * depth))


def _calls(calls: Sequence[Call]) -> str:
    return "\n".join(str(call) for call in calls)


def _region(d: Mapping[str, Any], module: str, inside: str) -> str:
    """The region that the indexed module is in: its own, or that of the nearest module that encloses it."""
    regions = d.get("regions", {})
    path = module[: len(module) - len(inside)].rstrip(".") if inside else module
    while path not in regions:
        if not path:
            return ""
        path = path.rpartition(".")[0]
    return str(regions[path])


def _totals(d: Mapping[str, Any]) -> list[RenderableType]:
    sums = axis_sums(d)
    lines: list[RenderableType] = []
    if sums:
        figures = (("collectives", "right"), ("per step", "right"), ("a rank sends", "right"))
        table = grid(("axis", ""), ("link", ""), *figures)
        for axis, s in sums.items():
            degree = _degree(d, axis)
            sent = bytes_text(s.wire) if s.wire or not s.routed else "by routing"
            table.add_row(Text(plain(f"{axis} {degree}")), link_of(d, axis), f"{s.calls:,}", str(s), sent)
        if len(sums) > 1:
            s = sum(sums.values(), Sum())
            table.add_row("all", "", f"{s.calls:,}", str(s), bytes_text(s.wire), style="bold")
        lines += [table, ""]
    kinds = list(d.get("regions", {}).values())
    implicit = sum(bool(b["implicit"]) for b in d.get("boundaries", ()))
    lines.append(
        Text(
            f"regions: {kinds.count('local')} local, {kinds.count('dtensor')} dtensor   "
            f"implicit redistributions: {implicit}"
        )
    )
    return lines


def _degree(d: Mapping[str, Any], axis: str) -> str:
    sizes = {c["ranks_per_group"] for c in d["collectives"] if c["axis"] == axis}
    return "/".join(str(n) for n in sorted(sizes))


def _details(d: Mapping[str, Any], verbose: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if d.get("placements"):
        table = grid(("parameter", ""), ("shape", ""), ("on a rank", ""), ("layout", ""))
        items = [(p["name"], p) for p in d["placements"]]
        for group in fold(items, _placement_key):
            for path, p in group.items:
                name = ".".join(s for s in (group.label, path) if s)
                table.add_row(Text(plain(name)), *(Text(plain(c)) for c in _placement_key(p)))
        parts += ["", Text("placements", style="bold"), table]
    quiet = {(r.module, r.tensor, r.axis) for r in rows(d)}
    moved = [b for b in d.get("boundaries", ()) if (b["module"], b["tensor"], b["axis"]) not in quiet]
    if verbose > 1 and moved:
        table = grid(("boundary that moves nothing", ""), ("tensor", ""), ("in -> out", ""), ("from", ""))
        for group in fold([(b["module"], b) for b in moved], _boundary_key):
            for path, b in group.items:
                name = ".".join(s for s in (group.label, path) if s)
                layout = f"{b['from']} -> {b['to']} {b['axis']}"
                cells = (f"{name} {b['side']}", b["tensor"], layout, b.get("where") or "")
                table.add_row(*(Text(plain(c)) for c in cells))
        parts += ["", table]
    parts += [*_gathers(d), *_formulas(d)]
    if d.get("uncounted"):
        parts += [
            "",
            Text("without a formula", style="bold"),
            *(Text(plain(f"  {n}: {why}")) for n, why in d["uncounted"].items()),
        ]
    for title in ("rules", "conditions"):
        if d.get(title):
            parts += ["", Text(title, style="bold"), *(Text("  " + plain(_line(x))) for x in d[title])]
    return parts


def _gathers(d: Mapping[str, Any]) -> list[RenderableType]:
    """What backward keeps: of each gathered input under either choice, equal layers once; and of each layer in all."""
    parts: list[RenderableType] = []
    if d.get("gathers"):
        titles = ("gathered input", "axis", "save keeps", "regather keeps", "and sends", "chosen")
        table = grid(*((t, "right" if "keeps" in t or "sends" in t else "") for t in titles))
        for group in fold([(g["module"], g) for g in d["gathers"]], _gather_key):
            for path, g in group.items:
                name = ".".join(s for s in (group.label, path) if s) + " " + g["tensor"]
                name += f"  x{group.count}" if group.count > 1 else ""
                sizes = (g["save"]["kept_bytes"], g["regather"]["kept_bytes"], g["regather"]["sent_bytes"])
                cells = (name, g["axis"], *map(bytes_text, sizes), g["gather"])
                table.add_row(*(Text(plain(c)) for c in cells))
        parts += ["", table]
    if d.get("kept_bytes"):
        table = grid(("kept for backward, inside", ""), ("on a rank", "right"))
        for group in fold(list(d["kept_bytes"].items()), lambda n: n):
            for path, n in group.items:
                name = ".".join(s for s in (group.label, path) if s) + (f"  x{group.count}" if group.count > 1 else "")
                table.add_row(Text(plain(name)), bytes_text(n))
        parts += ["", table]
    return parts


def _gather_key(g: Mapping[str, Any]) -> tuple[Any, ...]:
    return g["tensor"], g["axis"], g["gather"], g["save"]["kept_bytes"], g["regather"]["kept_bytes"]


def _formulas(d: Mapping[str, Any]) -> list[RenderableType]:
    """The symbolic counts, equal layers once."""
    if not d.get("counts"):
        return []
    table = grid(("symbolic count", ""), ("elements", ""))
    seen: dict[tuple[str, str], int] = {}
    for name, formula in d["counts"].items():
        seen[star(name), formula] = seen.get((star(name), formula), 0) + 1
    for (name, formula), n in seen.items():
        table.add_row(Text(plain(name) + (f"  x{n}" if n > 1 else "")), Text(plain(formula)))
    return ["", table]


def _boundary_key(b: Mapping[str, Any]) -> tuple[str, ...]:
    return b["side"], b["tensor"], b["axis"], b["from"], b["to"]


def _placement_key(p: Mapping[str, Any]) -> tuple[str, str, str]:
    return tensor_text(p.get("dtype"), p["shape"], None), str(list(p["local_shape"])), layout_text(p["layout"])


def _remarks(d: Mapping[str, Any]) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(plain(f"warning: {w}"), style="yellow") for w in d.get("warnings", ())]
    lines += [Text(plain(f"note: {n}")) for n in d.get("notes", ())]
    return lines


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{k}: {layout_text(v) if isinstance(v, Mapping) else v}" for k, v in value.items())
    return str(value)
