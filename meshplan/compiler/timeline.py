"""The order of things in the lowered forward: collectives, modules entered and left, tensors saved for backward.

Autograd runs nodes in the reverse of their creation, so the backward order follows from this one list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshplan.compiler.repeats import moved_path
from meshplan.compiler.sites import Site
from meshplan.errors import Where
from meshplan.runtime.comm import AxisGroup


@dataclass(frozen=True)
class Sent:
    """One collective as the rank makes it: the full tensor's elements (padding included) and torch dtype name."""

    op: str
    axis: str
    ranks: int
    elements: int
    dtype: str


@dataclass(frozen=True)
class Event:
    """`what` is "move", "operator", "enter", "leave" or "saved". Moves and operators carry what they send each way;
    `grad` says whether the mate runs."""

    what: str
    module: str
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    grad: bool = False
    site: Site | None = None
    move: str = ""
    tensor: str = ""
    where: Where | None = None


class Timeline:
    """Collects events; its `heard` is what abstract groups report to."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._heard: list[Sent] = []

    def heard(self, op: str, group: AxisGroup, full: Tensor) -> None:
        self._heard.append(Sent(op, group.axis, group.size, full.numel(), str(full.dtype).removeprefix("torch.")))

    def enter(self, path: str, grad: bool) -> None:
        """A module begins; `grad`: one of its inputs needs a gradient."""
        self.events.append(Event("enter", path, grad=grad))

    def leave(self, path: str, grad: bool) -> None:
        """A module ends; `grad`: one of its outputs needs a gradient."""
        self.events.append(Event("leave", path, grad=grad))

    def repeat(self, start: int, end: int, old: str, new: str) -> None:
        """Events `start` to `end`, which module `old` made, once more for its equal `new`."""
        for e in self.events[start:end]:
            module = moved_path(e.module, old, new)
            if module is None:
                self.events.append(e)
                continue
            site = replace(e.site, module=moved_path(e.site.module, old, new) or e.site.module) if e.site else None
            self.events.append(replace(e, module=module, site=site))

    def saved(self) -> None:
        if self.events and self.events[-1].what == "saved":
            return
        self.events.append(Event("saved", ""))

    def moved(self, site: Site, what: str, run: Callable[[], Tensor], mate: Callable[[Tensor], object] | None, tensor: str,
              where: Where | None) -> Tensor:
        """Run one move and note what it sends; `mate` is run on the result's like, to hear what it will send in backward."""
        self._heard.clear()
        out = run()
        forward = tuple(self._heard)
        self._heard.clear()
        if mate is not None:
            with torch.no_grad():
                mate(torch.empty_like(out))
        back = tuple(self._heard)
        self.events.append(Event("move", site.module, forward, back, mate is not None, site, what, tensor, where))
        return out

    @contextmanager
    def operator(self, call: Any, module: str) -> Iterator[None]:
        """Around a semantic operator: whatever it sends forward is heard."""
        self._heard.clear()
        yield
        self.events.append(Event("operator", module, tuple(self._heard), (), False, None, call.name, "", call.where))
