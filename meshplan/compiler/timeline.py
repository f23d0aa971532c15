"""The order of things in the lowered forward: collectives, modules entered and left, tensors saved for backward.

Autograd runs nodes in the reverse of their creation, so the backward order follows from this one list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.compiler.reach import Reach, node_of
from meshplan.compiler.repeats import FullTraceNeeded, moved_path
from meshplan.compiler.sites import Site
from meshplan.errors import Where
from meshplan.runtime.comm import UNEVEN, AxisGroup


@dataclass(frozen=True)
class Sent:
    """One collective as the rank makes it: the full tensor's elements (padding included) and torch dtype name. Of a `routed` one
    they are those of an even routing."""

    op: str
    axis: str
    ranks: int
    elements: int
    dtype: str
    routed: bool = False


@dataclass(frozen=True)
class Event:
    """`what` is "move", "operator", "enter", "leave" or "saved". Moves and operators carry what they send each way;
    `grad` says whether a backward from the outputs comes by: whether the mate runs, a gradient enters or leaves the module,
    what was saved is read. It does not come to a result that is only used detached, or that nobody uses.

    A "saved" event says that backward keeps something, `kept` new bytes of it. One with a `site` is the last use of
    what was gathered at that input: `choice` is the bytes that are new if the whole tensor is kept, or the shard is;
    `again` what gathering it again would send; `written` whether the module writes into it. See `gathers.py`.
    """

    what: str
    module: str
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    grad: bool = False
    site: Site | None = None
    move: str = ""
    tensor: str = ""
    where: Where | None = None
    kept: int = 0
    choice: tuple[int, int] = (0, 0)
    written: bool = False
    again: tuple[Sent, ...] = ()
    node: Any = field(default=None, repr=False, compare=False)  # of autograd, until `Timeline.reached`


@dataclass(frozen=True)
class _Edge:
    """Where a module begins or ends in autograd's graph: the nodes of what crosses, the number of the next node made."""

    nodes: tuple[Any, ...]
    number: int


def _edge(what: str, path: str, tensors: Sequence[Tensor]) -> Event:
    nodes = tuple(n for n in map(node_of, tensors) if n is not None)
    return Event(what, path, grad=bool(nodes), node=_Edge(nodes, compat.next_node()))


@dataclass
class _Gathered:
    """What an input of a running module was gathered to: the tensor, its shard, its move, the index of its last use."""

    path: str
    whole: Tensor
    shard: Tensor
    version: int
    move: Event
    last: int | None = None


class Timeline:
    """Collects events; its `heard` is what abstract groups report to."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.constants: set[int] = set()  # storages of parameters and buffers, which are there anyway
        self._standing: list[tuple[str, list[Any], list[Any]]] = []  # layers not run: what their equal's returned, and theirs
        self._heard: list[Sent] = []
        self._live: dict[int, _Gathered] = {}
        self._stored: set[int] = set()
        # Of an operator: how much was sent when it last saved something, and in its backward when it first read that.
        self._last_saved = 0
        self._first_read: int | None = None

    def heard(self, op: str, group: AxisGroup, full: Tensor) -> None:
        name = str(full.dtype).removeprefix("torch.")
        bare = op.removesuffix(UNEVEN)
        self._heard.append(Sent(bare, group.axis, group.size, full.numel(), name, bare != op))

    def enter(self, path: str, inputs: Sequence[Tensor]) -> None:
        """A module begins, handed `inputs`."""
        self.events.append(_edge("enter", path, inputs))

    def leave(self, path: str, outputs: Sequence[Tensor]) -> None:
        """A module ends and returns `outputs`."""
        for key, g in list(self._live.items()):
            if g.path == path:
                self._settle(self._live.pop(key))
        self.events.append(_edge("leave", path, outputs))

    def repeat(self, start: int, end: int, old: str, new: str, made: list[tuple[Tensor, Tensor]]) -> None:
        """Events `start` to `end`, which module `old` made, once more for its equal `new`; `made` are the new tensors that
        each of them returns."""
        self._standing.append((new, [node_of(a) for a, _ in made], [node_of(b) for _, b in made]))
        for e in self.events[start:end]:
            module = moved_path(e.module, old, new)
            if module is None:
                self.events.append(e)
                continue
            site = replace(e.site, module=moved_path(e.site.module, old, new) or e.site.module) if e.site else None
            self.events.append(replace(e, module=module, site=site))

    def gathered(self, path: str, whole: Tensor, shard: Tensor) -> None:
        """The last move gathered `whole` from `shard` at an input of module `path`."""
        self._live[compat.storage_key(whole)] = _Gathered(path, whole, shard, whole._version, self.events[-1])

    def read(self) -> None:
        """Backward reads something that was saved."""
        if self._first_read is None:
            self._first_read = len(self._heard)

    def saved(self, t: Tensor) -> None:
        """Autograd keeps `t` for the node that it has just made."""
        self._last_saved = len(self._heard)
        made = (compat.next_node() - 1,)
        g = self._live.get(compat.storage_key(t))
        if g is not None and g.whole.dtype == t.dtype and t.numel():
            g.last = len(self.events)
            self.events.append(Event("saved", "", node=made))
            return
        kept = self._new_bytes(t)
        last = len(self.events) - 1
        own = last < 0 or self.events[last].what != "saved" or any(g.last == last for g in self._live.values())
        if own or self.events[last].site is not None:
            self.events.append(Event("saved", "", kept=kept, node=made))
        else:
            e = self.events[last]
            self.events[last] = replace(e, kept=e.kept + kept, node=e.node + made)

    def _new_bytes(self, t: Tensor) -> int:
        key = compat.storage_key(t)
        if key in self.constants or key in self._stored:
            return 0
        self._stored.add(key)
        return t.untyped_storage().nbytes()

    def _settle(self, g: _Gathered) -> None:
        """The module that a tensor was gathered for has returned: mark the last use that keeps it."""
        if g.last is None:
            return
        known = compat.storage_key(g.shard) in self._stored
        choice = (self._new_bytes(g.whole), 0 if known else g.shard.untyped_storage().nbytes())
        self.events[g.last] = replace(
            self.events[g.last], module=g.move.module, site=g.move.site, move=g.move.move, where=g.move.where,
            choice=choice, written=g.whole._version != g.version, kept=choice[0], again=g.move.forward,
        )  # fmt: skip

    def moved(
        self, site: Site, what: str, run: Callable[[], Tensor], mate: Callable[[Tensor], object] | None, tensor: str,
        where: Where | None,
    ) -> Tensor:  # fmt: skip
        """Run one move and note what it sends; `mate` is run on the result's like, to hear what backward will send."""
        self._heard.clear()
        out = run()
        forward = tuple(self._heard)
        self._heard.clear()
        if not out.requires_grad:  # made with gradients off
            mate = None
        if mate is not None:
            with torch.no_grad():
                mate(torch.empty_like(out))
        back = tuple(self._heard)
        self.events.append(
            Event("move", site.module, forward, back, mate is not None, site, what, tensor, where, node=out.grad_fn)
        )
        return out

    def reached(self, outputs: Sequence[Tensor]) -> set[int]:
        """The forward is over. What no gradient of `outputs` comes to will not run; returns the `Reach.leaves`.

        Raises FullTraceNeeded for a layer of which a gradient asks something else than of the equal that stands for it."""
        reach = Reach(outputs)
        for path, theirs, own in self._standing:
            if any(reach.node(a) != reach.node(b) for a, b in zip(theirs, own, strict=True)):
                self.forget()
                raise FullTraceNeeded(path)
        inside: list[tuple[int, _Edge]] = []  # index and inputs of the modules that are not left yet
        for i, e in enumerate(self.events):
            node, live = e.node, e.grad
            if e.what == "enter":
                inside.append((i, node))
            elif e.what == "leave":
                at, inputs = inside.pop()
                live = live and any(map(reach.node, node.nodes))
                entered = reach.through(inputs.nodes, inputs.number, node.number) or any(
                    n in node.nodes for n in inputs.nodes  # handed back as it came
                )
                self.events[at] = replace(self.events[at], grad=self.events[at].grad and live and entered)
            elif e.what == "saved":
                live = reach.numbers(node)
            elif node is not None:
                live = live and reach.node(node)
            self.events[i] = replace(e, node=None, grad=live, backward=e.backward if live else ())
        self._standing.clear()
        return reach.leaves()

    def forget(self) -> None:
        """Let go of autograd's graph after a forward that failed: it holds on to this pass through what it saved, out of sight
        of the garbage collector."""
        self.events.clear()
        self._standing.clear()
        self._live.clear()

    def operator(self, call: Any, module: str, run: Callable[[], Any], inputs: Sequence[Tensor]) -> Any:
        """Run one semantic operator on `inputs` and note what it sends; its own backward is run on the like of its result, or of
        its results, all of one node."""
        self._heard.clear()
        start, self._last_saved = len(self.events), 0
        out = run()
        forward, last = tuple(self._heard), self._last_saved
        self._heard.clear()
        self._first_read = None
        live = [t for t in inputs if t.requires_grad]
        made = [t for t in ([out] if isinstance(out, Tensor) else out) if t.requires_grad]
        if made and live:
            torch.autograd.grad(made, live, [torch.empty_like(t) for t in made], retain_graph=True, allow_unused=True)
        own = len(self._heard)
        first = own if self._first_read is None else self._first_read
        if live:  # where one input is made from another (a parameter of an earlier call), what is between them was heard too
            ones = [torch.empty_like(t) for t in live]
            torch.autograd.grad(live, live, ones, retain_graph=True, allow_unused=True)
        back = tuple(self._heard[: 2 * own - len(self._heard)])
        # Before what it saved stands what was sent until then, which a recompute that ends there sends again; behind it what is
        # sent later, and in backward before anything saved is read.
        saves, node = len(self.events) > start, made[0].grad_fn if made else None
        last, first = (last, min(first, len(back))) if saves else (len(forward), 0)

        def part(there: tuple[Sent, ...], home: tuple[Sent, ...]) -> Event:
            return Event("operator", module, there, home, bool(made), None, call.name, "", call.where, node=node)

        self.events.insert(start, part(forward[:last], back[first:]))
        if forward[last:] or back[:first]:
            self.events.append(part(forward[last:], back[:first]))
        for g in self._live.values():
            if g.last is not None and g.last >= start:
                g.last += 1
        return out
