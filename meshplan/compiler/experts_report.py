"""What a lowered program says of its experts: where they are, what a rank holds, and what each way to dispatch would send."""

from __future__ import annotations

import math
from typing import Any

import torch

from meshplan.compiler.commgraph import local_param_shape
from meshplan.compiler.experts import BLOCK, OPERATOR
from meshplan.compiler.lowered import Core
from meshplan.errors import PlanError
from meshplan.mesh.expert_view import VIEW
from meshplan.ops.experts.cost import expression
from meshplan.ops.experts.experts import dispatch_of
from meshplan.ops.experts.payload import packed_width


def experts_json(core: Core, rank: int, imbalance: float = 1.0) -> dict[str, Any] | None:
    """The experts' view of the ranks, and a dict for each module; None where the plan has no experts.

    Keys of a module: `experts` in all and `held` by a rank; `bytes` of their parameters and `held_bytes`, before FSDP; `sends`:
    what a rank dispatches (`tokens` T, `k`, `width` H, `bytes` b a number, `ranks` W, `imbalance` i) and by method `{"formula",
    "bytes", "backward", "used"}` of rows that the busiest rank sends in forward and in backward. Modelled: expected for experts
    that are chosen alike.

    Arguments:
        imbalance: rows of the busiest rank's experts over the mean of all, as `expert_load` measures it.

    Raises PlanError `bad-value` for one below 1.
    """
    routed = core.experts
    if not imbalance >= 1:
        raise PlanError(f"imbalance {imbalance}: the busiest rank has no less than the mean", code="bad-value", legal="1 or more")
    if routed is None:
        return None
    sent = {
        edit.replacement.get("module"): edit.replacement.get("sent")
        for edits in core.program.edits.values() for edit in edits.values()
        if edit.replacement is not None and edit.replacement.name in (OPERATOR, BLOCK)
    }  # fmt: skip
    modules = []
    for path, found in routed.modules.items():
        plans = [core.params[name] for name in (*found.packed, *found.listed)]
        held = found.experts // routed.view.degree("ep") if found.packed else found.experts
        modules.append({
            "module": path, "experts": found.experts, "held": held,
            "bytes": sum(math.prod(p.shape) * _size(p.dtype) for p in plans),
            "held_bytes": sum(math.prod(local_param_shape(p, core.spec, rank)) * _size(p.dtype) for p in plans),
            "sends": _sends(core, sent.get(path), imbalance),
        })  # fmt: skip
    view = {name: routed.view.degree(name) for name in VIEW}
    return {"view": view, "borrowed": routed.view.borrowed, "dispatch": routed.section.way, "modules": modules}


def _sends(core: Core, sent: tuple[int, int, int, str] | None, imbalance: float) -> dict[str, Any] | None:
    assert core.experts is not None
    section, ranks = core.experts.section, core.experts.view.degree("ep")
    if sent is None or ranks == 1:
        return None
    tokens, k, width, dtype = sent
    numbers = {"T": tokens, "k": k, "H": width, "b": _size(dtype), "W": ranks, "i": imbalance}
    way = dispatch_of(section.dispatch, ranks, k)
    once = way["dispatch"] == "fused" or (way["dispatch"] == "alltoall" and way["dedup"])
    used: tuple[str, ...] = ("dedup",) if once else (way["dispatch"],)
    names = ["alltoall", "dedup", "allgather"]
    if section.inner is not None:
        inside = "inside" if way["dedup"] else "inside plain"
        numbers |= {"I": section.inner, "O": ranks // section.inner}
        names += ["across", inside]
        used = ("across", inside)
    # Half of the rows are dispatched, half come home; 8 bits are of the former, forward.
    wire = 1.0 if section.payload is None else (1 + packed_width(width) / (width * _size(dtype))) / 2
    methods = {}
    for name in names:
        formula = expression(name)
        sends = float(formula.subs(numbers))
        methods[name] = {
            "formula": str(formula), "bytes": round(sends * wire), "backward": round(sends), "used": name in used
        }  # fmt: skip
    told = {"tokens": tokens, "k": k, "width": width, "bytes": _size(dtype), "ranks": ranks, "imbalance": imbalance}
    return {**told, "inner": section.inner, "payload": section.payload, "methods": methods}


def rounding(core: Core) -> list[str]:
    """What experts are given, where it is not what one device gives them."""
    section = core.bound.plan.experts
    if section is None or section.payload is None:
        return []
    return [
        "experts.payload fp8: experts are given rows rounded to 4 significant bits, off by up to a sixteenth; `verify` compares "
        "with one device that rounds alike"
    ]


def _size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize  # type: ignore[no-any-return]
