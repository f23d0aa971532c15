"""The report as one HTML page that loads nothing from elsewhere and runs no script; every name is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from meshplan.report.fold import fold
from meshplan.report.program import program_text
from meshplan.report.rows import Row, axis_sums, link_of, rows
from meshplan.report.text import mesh_text
from meshplan.report.units import bytes_text, layout_text, plain, short_placement, tensor_text

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #1c2330; background: #fff }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p.facts { color: #586174; margin: .2rem 0 1.5rem }
table { border-collapse: collapse; width: 100% } caption { text-align: left; color: #586174 }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #e3e6ec; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
td.name, pre, code { font-family: ui-monospace, monospace; font-size: 13px; overflow-wrap: anywhere }
tr.block td { font-weight: 600; background: #f5f6f9 } small { color: #586174 }
.bar { display: inline-block; height: .6rem; background: #4d74d9; border-radius: 2px }
.warning { background: #fff4d6; padding: .4rem .8rem; border-left: 4px solid #e0a800; margin: .4rem 0 }
@media (prefers-color-scheme: dark) {
  body { color: #dde2ec; background: #12151c } tr.block td { background: #1c212c }
  th, td { border-color: #2b3140 } .warning { background: #3a3113 } }
"""


def html_page(d: Mapping[str, Any]) -> str:
    """`Lowered.to_json()` as a page for a browser, a pull request or an archive."""
    world, node = d["world_size"], d["node_size"]
    facts = f"{mesh_text(d)} · {world} ranks on {-(-world // node)} nodes · bytes counted from the program"
    body = [
        f"<h1>{_e(d['model'])}</h1><p class='facts'>{_e(facts)}</p>",
        *(f"<p class='warning'>{_e(w)}</p>" for w in d.get("warnings", ())),
        "<h2>Per step, by axis</h2>",
        _axes(d),
        "<h2>Collectives</h2>",
        _table(
            "Layers that do the same are shown once.",
            ("module", "in → out", "forward", "backward", "per step"),
            _blocks([(row.module, row) for row in rows(d)], 0, 1),
            numeric=1,
        ),
        "<h2>Placements</h2>",
        _table("", ("parameter", "shape", "on a rank", "layout"), _placements(d)),
        f"<details><summary>Program of a rank</summary><pre>{_e(program_text(d), keep_lines=True)}</pre></details>",
        *_lists(d),
    ]
    # The policy is a second fence: were a name to escape its escaping, the browser still would not run it.
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_e(d['model'])}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _e(text: object, keep_lines: bool = False) -> str:
    lines = str(text).split("\n") if keep_lines else [str(text)]
    return "\n".join(escape(plain(line), quote=True) for line in lines)


def _table(caption: str, titles: Sequence[str], body: Iterable[str], numeric: int = 0) -> str:
    """A table; the last `numeric` columns are right-aligned."""
    first = len(titles) - numeric
    head = "".join(f"<th{' class=n' if i >= first else ''}>{_e(t)}</th>" for i, t in enumerate(titles))
    rest = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f"<table><caption>{_e(caption)}</caption>{rest}"


def _axes(d: Mapping[str, Any]) -> str:
    sums = axis_sums(d)
    most = max((s.bytes for s in sums.values()), default=0) or 1
    body = [
        f"<tr><td class=name>{_e(axis)}</td><td>{_e(link_of(d, axis))}</td>"
        f"<td><span class=bar style='width:{max(1, round(160 * s.bytes / most))}px'></span></td>"
        f"<td class=n>{s.calls:,}</td><td class=n>{_e(s)}</td><td class=n>{bytes_text(s.wire)}</td></tr>"
        for axis, s in sums.items()
    ]
    return _table("", ("axis", "link", "", "collectives", "bytes", "a rank sends"), body, numeric=3)


def _blocks(items: Sequence[tuple[str, Row]], depth: int, repeat: int) -> Iterable[str]:
    for group in fold(items, lambda row: row.alike):
        if group.label:
            times = f" ×{group.count}" if group.count > 1 else ""
            yield f"<tr class=block><td class=name colspan=5>{_indent(depth)}{_e(group.label + times)}</td></tr>"
            yield from _blocks(group.items, depth + 1, repeat * group.count)
            continue
        for path, row in group.items:
            label = " ".join(s for s in (path, row.what) if s) or row.tensor
            calls = ["<br>".join(_e(c) for c in row.of(phase)) for phase in ("forward", "backward", "optimizer")]
            backward = "<br>".join(s for s in (calls[1], calls[2] and calls[2] + " (optimizer)") if s)
            source = " ".join(s for s in (row.tensor, row.where) if s)
            yield (
                f"<tr><td class=name>{_indent(depth)}{_e(label)}<br><small>{_indent(depth)}{_e(source)}</small></td>"
                f"<td>{_e(short_placement(row.layout))} {_e(row.axis)}{' <small>implicit</small>' if row.implicit else ''}</td>"
                f"<td>{calls[0]}</td><td>{backward}</td><td class=n>{_e(row.step.times(repeat))}</td></tr>"
            )


def _indent(depth: int) -> str:
    return "&emsp;" * depth


def _placements(d: Mapping[str, Any]) -> Iterable[str]:
    def cells(p: Mapping[str, Any]) -> tuple[str, ...]:
        return tensor_text(p.get("dtype"), p["shape"], None), str(list(p["local_shape"])), layout_text(p["layout"])

    for group in fold([(p["name"], p) for p in d["placements"]], cells):
        for path, p in group.items:
            name = ".".join(s for s in (group.label, path) if s)
            yield f"<tr><td class=name>{_e(name)}</td>" + "".join(f"<td>{_e(c)}</td>" for c in cells(p)) + "</tr>"


def _lists(d: Mapping[str, Any]) -> Iterable[str]:
    counts = [f"{name} = {formula}" for name, formula in d.get("counts", {}).items()]
    titled = {"Rules": d.get("rules", ()), "Conditions": d.get("conditions", ()), "Symbolic counts": counts}
    for title, values in {**titled, "Notes": d.get("notes", ())}.items():
        if values:
            lines = "".join(f"<li><code>{_e(v)}</code></li>" for v in values)
            yield f"<details><summary>{_e(title)} ({len(values)})</summary><ul>{lines}</ul></details>"
