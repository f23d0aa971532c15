"""The lowered program as pseudo-code: per block, what is called with which local weights, and what moves in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshplan.report.fold import fold
from meshplan.report.rows import Row, rows
from meshplan.report.units import bytes_text, plain, short_placement, tensor_text

_BEFORE = frozenset({"input", "param"})


@dataclass
class _Module:
    """A node of the module tree, with what happens at it."""

    children: dict[str, _Module] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    before: list[tuple[str, str]] = field(default_factory=list)
    after: list[tuple[str, str]] = field(default_factory=list)

    def at(self, path: str) -> _Module:
        """The node at `path` below this one, made if need be."""
        node = self
        for step in path.split(".") if path else ():
            node = node.children.setdefault(step, _Module())
        return node


def program_text(d: Mapping[str, Any], block: str | None = None) -> str:
    """The program of `Lowered.to_json()`, one line a call; equal layers once.

    Arguments:
        block: only the modules at and below this path, for example `layers.0`; None for the whole model.

    A weight is written as this rank holds it, `f32[256, 512] {tp: S(0)}`; a line that communicates carries what it
    changes and its size, and after `|` the mate that runs in backward. Modules come in the order they are defined in,
    which the parameters' order gives.
    """
    prefix = "" if block is None else block
    events: list[tuple[str, tuple[str, Any]]] = []
    for p in d["placements"]:
        module, _, name = p["name"].rpartition(".")
        events.append((module, ("weight", (name, tensor_text(p.get("dtype"), p["local_shape"], p["layout"])))))
    for row in rows(d):
        events.append((row.module, ("row", (_line(row), row.what))))
    inside = [(m, e) for m, e in events if not prefix or m == prefix or m.startswith(prefix + ".")]
    if prefix:
        inside = [(m[len(prefix) :].lstrip("."), e) for m, e in inside]
    root = _Module()
    root.at("")
    for group in fold(inside, lambda event: event):
        times = f" x{group.count}" if group.count > 1 else ""
        # A folded label is one step of the tree: its dots are part of the name that is printed.
        node = root.children.setdefault(f"{group.label}{times}", _Module()) if group.label else root
        for path, (kind, value) in group.items:
            place = node.at(path)
            if kind == "weight":
                place.weights.append("{}: {}".format(*value))
            elif value[1] in _BEFORE or value[1].startswith("fsdp ("):
                place.before.append(value[0])
            else:
                place.after.append(value[0])
    lines = _lines(root, prefix or plain(d["model"]), 0)
    room = max((len(code) for code, note in lines if note), default=0)
    return "\n".join(f"{code:<{room}}  # {note}" if note else code for code, note in lines) + "\n"


def _lines(node: _Module, name: str, depth: int) -> list[tuple[str, str]]:
    """(code, note) of a module: its gathers, its own call or its children, what becomes of its result."""
    pad = "    " * depth
    if not node.children:
        call = f"{name}({', '.join(node.weights)})" if node.weights else f"{name}()"
        return [(pad + c, n) for c, n in (*node.before, (plain(call), ""), *node.after)]
    out = [(f"{pad}{plain(name)}:", "")]
    deeper = pad + "    "
    out += [(deeper + c, n) for c, n in node.before]
    out += [(deeper + plain(w), "") for w in node.weights]
    for child, below in node.children.items():
        out += _lines(below, child, depth + 1)
    return out + [(deeper + c, n) for c, n in node.after]


def _line(row: Row) -> tuple[str, str]:
    """A communicating line: `x = all_gather(x, tp)` and `S(1) -> R, 64 MiB | reduce_scatter 64 MiB`."""
    name = plain(row.tensor) if row.tensor.isidentifier() else "out"
    there = row.of("forward")
    code = name
    for call in there:
        code = f"{call.op}({code}, {plain(row.axis)})"
    sizes = ", ".join(bytes_text(c.bytes) if c.bytes is not None else "by routing" for c in there)
    back = ", ".join(str(c) for phase in ("backward", "optimizer") for c in row.of(phase))
    note = ", ".join(s for s in (plain(short_placement(row.layout)), sizes) if s) + (f" | {back}" if back else "")
    return (f"{name} = {code}" if there else f"# {name} over {plain(row.axis)}, backward only"), note
