"""Sequences gathered at module inputs: kept for backward, or gathered again there. What each choice keeps and sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshplan.compiler.bind import Bound
from meshplan.compiler.sites import Site
from meshplan.compiler.timeline import Event
from meshplan.errors import PlanError
from meshplan.runtime.recorder import wire_bytes


@dataclass(frozen=True)
class Gather:
    """One gathered input that backward needs.

    Attributes:
        module, tensor, axis: as in the comm graph.
        again: whether backward gathers it once more; then only the shard is kept.
        whole_bytes, shard_bytes: what a rank keeps for it under either choice.
        sent_bytes: what a rank sends to gather it once more.
    """

    module: str
    tensor: str
    axis: str
    again: bool
    whole_bytes: int
    shard_bytes: int
    sent_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module, "tensor": self.tensor, "axis": self.axis,
            "gather": "regather" if self.again else "save",
            "save": {"kept_bytes": self.whole_bytes, "sent_bytes": 0},
            "regather": {"kept_bytes": self.shard_bytes, "sent_bytes": self.sent_bytes},
        }  # fmt: skip


def regathered(events: Iterable[Event], bound: Bound, shared: set[Site]) -> tuple[Event, ...]:
    """The events with the gathers of `recompute: {policy: none, gather: regather}` at the last uses of their tensors,
    where backward comes first. Sites in `shared` keep the tensor: it lives on with the shard for its other users.

    Raises PlanError `regather-in-place`, `regather-compiled`.
    """
    out = []
    for e in events:
        last = e.what == "saved" and e.site is not None and e.site not in shared
        if last and _inside(e.module, bound.regather_units):
            _check(e, bound)
            e = replace(e, backward=e.again if e.grad else (), kept=e.choice[1])
        out.append(e)
    return tuple(out)


def sites_regathered(events: Iterable[Event]) -> frozenset[Site]:
    """The inputs whose tensor is gathered again."""
    return frozenset(e.site for e in events if e.what == "saved" and e.site is not None and e.backward)


def gathers(events: Iterable[Event]) -> list[Gather]:
    """Every gathered input that backward needs, in program order."""
    out = []
    for e in events:
        if e.what == "saved" and e.site is not None:
            sent = sum(wire_bytes(s.op, s.elements * getattr(torch, s.dtype).itemsize, s.ranks) for s in e.again)
            axis = e.again[0].axis if e.again else ""
            out.append(Gather(e.module, e.site.key, axis, bool(e.backward), *e.choice, sent))
    return out


def kept_bytes(events: Iterable[Event], units: Iterable[str]) -> dict[str, int]:
    """Bytes that autograd keeps for backward, on one rank, of what is made inside each module of `units`, parameters
    left out. Of a unit that recompute runs again it is what lives during that unit's own backward."""
    out = dict.fromkeys(units, 0)
    stack: list[str] = []
    for e in events:
        if e.what == "enter":
            stack.append(e.module)
        elif e.what == "leave":
            stack.pop()
        elif e.what == "saved":
            for path in dict.fromkeys(stack):
                if path in out:
                    out[path] += e.kept
    return out


def _inside(path: str, units: Iterable[str]) -> bool:
    return any(not unit or path == unit or path.startswith(unit + ".") for unit in units)


def _check(e: Event, bound: Bound) -> None:
    if e.written:
        raise PlanError(
            f"{e.site} is written to after it was gathered, so it cannot be gathered again",
            code="regather-in-place", where=e.where, module=e.module,
            legal="gather: save there, or a module that does not write to its input",
        )  # fmt: skip
    for unit in bound.compile_units:
        if _inside(e.module, [unit]) or _inside(unit, [e.module]):
            raise PlanError(
                f"{e.module} is gathered again by hooks on saved tensors, which a compiled {unit} does not run",
                code="regather-compiled", where=e.where, module=e.module,
                legal="gather: save there, or no compile of it",
            )  # fmt: skip
