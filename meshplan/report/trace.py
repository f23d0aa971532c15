"""The collectives in program order as a Chrome trace: order and bytes, no times, because none was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTE = "one tick per collective: ts is its position in program order, not a time"


def trace_json(d: Mapping[str, Any]) -> dict[str, Any]:
    """`Lowered.to_json()` in the Trace Event Format that chrome://tracing and Perfetto open.

    Each collective is one tick wide on the track of its axis (a source of the format: "Trace Event Format", Google,
    complete events `X` and metadata events `M`); its bytes, wire bytes, elements, module and source line are in `args`.
    """
    axes = list(dict.fromkeys(c["axis"] for c in d["collectives"]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{d['model']}: program order, not time"}}
    ]
    for tid, axis in enumerate(axes):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": axis}})
    keep = ("module", "tensor", "dtype", "elements", "bytes", "wire_bytes", "ranks_per_group", "count", "where")
    for position, c in enumerate(d["collectives"]):
        events.append(
            {
                "ph": "X",
                "name": f"{c['op']} {c['module']}".rstrip(),
                "cat": c["phase"],
                "ts": position,
                "dur": 1,
                "pid": 0,
                "tid": axes.index(c["axis"]),
                "args": {key: c[key] for key in keep if c.get(key) is not None},
            }
        )
    return {"traceEvents": events, "otherData": {"unit": NOTE}}
