"""The collectives of a lowered program as rows: one tensor on one axis, its layouts, forward and backward together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import Topology, link_use
from meshplan.report.units import bytes_text, count_text

# What a collective alone says about layouts, where no boundary describes it.
_IMPLIED = {"all_gather": "S -> R", "reduce_scatter": "P -> S", "all_reduce": "P -> R", "all_to_all": "S -> S"} | dict.fromkeys(
    ("send", "peer_pull"), "ring"
)


@dataclass(frozen=True)
class Call:
    """Equal collectives of one row and phase: `bytes` and `wire` (sent by one rank) are of one of the `times` calls,
    None where routing decides."""

    op: str
    times: int
    dtype: str
    elements: int | None
    bytes: int | None
    wire: int | None

    def __str__(self) -> str:
        size = bytes_text(self.bytes) if self.bytes is not None else "(by routing)"
        return f"{f'{self.times}x ' if self.times > 1 else ''}{self.op} {size}"


@dataclass(frozen=True)
class Row:
    """One tensor's communication on one axis.

    Attributes:
        module: path of the module.
        what: `input`, `output`, `param`, `call` of the boundary, or `fsdp (218 M params)`.
        tensor, axis: as in the program.
        layout: `S(1) -> R`.
        calls: (phase, calls) for forward, backward and optimizer, those that are not empty.
        where: the user's source line.
        implicit: whether no rule asked for it.
    """

    module: str
    what: str
    tensor: str
    axis: str
    layout: str
    calls: tuple[tuple[str, tuple[Call, ...]], ...]
    where: str
    implicit: bool

    def of(self, phase: str) -> tuple[Call, ...]:
        """The calls of one phase."""
        return dict(self.calls).get(phase, ())

    @property
    def alike(self) -> tuple[Any, ...]:
        """What must be equal for two layers' rows to be shown as one."""
        return self.what, self.tensor, self.axis, self.layout, self.calls, self.implicit

    @property
    def step(self) -> Sum:
        """All that the row moves in a step."""
        return total(call for _, calls in self.calls for call in calls)


@dataclass(frozen=True)
class Sum:
    """Bytes of the full tensors, bytes one rank sends, calls, and calls whose size routing decides."""

    bytes: int = 0
    wire: int = 0
    calls: int = 0
    routed: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(
            self.bytes + other.bytes, self.wire + other.wire, self.calls + other.calls, self.routed + other.routed
        )

    def times(self, n: int) -> Sum:
        """The sum over `n` equal layers."""
        return Sum(self.bytes * n, self.wire * n, self.calls * n, self.routed * n)

    def __str__(self) -> str:
        if self.routed and not self.bytes:
            return "by routing"
        return bytes_text(self.bytes) + (" + routed" if self.routed else "")


def total(calls: Iterable[Call]) -> Sum:
    """The sum of `calls`."""
    out = Sum()
    for c in calls:
        out += Sum((c.bytes or 0) * c.times, (c.wire or 0) * c.times, c.times, c.times if c.bytes is None else 0)
    return out


def rows(d: Mapping[str, Any]) -> list[Row]:
    """The rows of `Lowered.to_json()`, in the program order of each one's first collective; backward-only ones follow
    the last row of the innermost module that encloses them."""
    boundaries = {(b["module"], b["tensor"], b["axis"]): b for b in d.get("boundaries", ())}
    units = {u["module"]: u for u in d.get("fsdp_units", ())}
    grouped: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for c in d["collectives"]:
        grouped.setdefault((c["module"], c["tensor"], c["axis"]), []).append(c)
    forward = [_row(k, cs, boundaries, units) for k, cs in grouped.items() if cs[0]["phase"] == "forward"]
    later = [_row(k, cs, boundaries, units) for k, cs in grouped.items() if cs[0]["phase"] != "forward"]
    # Backward meets modules in reverse: turned round, rows that only it has come in the order of the forward.
    for row in reversed(later):
        near = [i for i, other in enumerate(forward) if _under(other.module, row.module)]
        forward.insert(near[-1] + 1 if near else len(forward), row)
    return forward


def axis_sums(d: Mapping[str, Any]) -> dict[str, Sum]:
    """Axis -> all that it moves in a step, most first."""
    out: dict[str, Sum] = {}
    for c in d["collectives"]:
        out[c["axis"]] = out.get(c["axis"], Sum()) + total([_call(c)])
    return dict(sorted(out.items(), key=lambda item: -item[1].bytes))


def link_of(d: Mapping[str, Any], axis: str) -> str:
    """`NVLink` or `network`: what bounds the groups of `axis` (names joined by `+`). The optional `links` of the dict
    (axis -> link) goes first, for axes that the mesh does not name (experts); `unknown link` if neither knows it."""
    try:
        if axis in d.get("links", {}):
            return str(d["links"][axis])
        spec = MeshSpec.resolve(d["mesh"], d["world_size"])
        for cut, parts in d.get("sub_axes", {}).items():
            spec = spec.split_axis(cut, parts)
        return link_use(spec, Topology(d["node_size"]), *axis.split("+")).link or "unknown link"
    except (PlanError, KeyError):
        return "unknown link"


def _row(
    key: tuple[str, str, str],
    collectives: list[Mapping[str, Any]],
    boundaries: Mapping[tuple[str, str, str], Mapping[str, Any]],
    units: Mapping[str, Mapping[str, Any]],
) -> Row:
    module, tensor, axis = key
    phases: dict[str, dict[Call, int]] = {"forward": {}, "backward": {}, "optimizer": {}}
    for c in collectives:
        call = _call(c)
        one = Call(call.op, 1, call.dtype, call.elements, call.bytes, call.wire)
        held = phases[c["phase"]]
        held[one] = held.get(one, 0) + call.times
    calls = tuple(
        (phase, tuple(Call(c.op, n, c.dtype, c.elements, c.bytes, c.wire) for c, n in held.items()))
        for phase, held in phases.items()
        if held
    )
    boundary = boundaries.get(key)
    if boundary is not None:
        layout, what = f"{boundary['from']} -> {boundary['to']}", boundary["side"]
    else:
        layout, what = _IMPLIED.get(collectives[0]["op"], "-"), ""
        # An operator may send over a data axis too: the root unit's module counts the tokens of its loss there.
        if module in units and axis.startswith("dp") and collectives[0].get("what", "fsdp") == "fsdp":
            what = f"fsdp ({count_text(units[module]['params'])} params)"
    where = str(collectives[0].get("where") or "")
    return Row(module, what, tensor, axis, layout, calls, where, bool(boundary and boundary["implicit"]))


def _call(c: Mapping[str, Any]) -> Call:
    return Call(c["op"], c.get("count") or 1, c["dtype"], c["elements"], c["bytes"], c["wire_bytes"])


def _under(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")
