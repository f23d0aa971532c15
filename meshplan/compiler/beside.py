"""Which modules can compute while tokens are on their way to experts: those that the same code calls after them, on a tensor
that was there before, and that send nothing themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshplan.compiler.bind import Bound
from meshplan.compiler.capture import Trace
from meshplan.compiler.timeline import Event
from meshplan.plan.patterns import within

if TYPE_CHECKING:
    from meshplan.compiler.experts import ExpertsAt
    from meshplan.compiler.lowered import Program

_VIEWS = frozenset("view reshape flatten unflatten unsqueeze squeeze _unsafe_view".split())


@dataclass(frozen=True)
class Beside:
    """A module that is called once after experts, by the code of the same module.

    Attributes:
        experts, module: their paths; the block that calls both is the parent of both.
        source: where its one input is found when the experts are called: `argument`, `tokens`, or `viewed`, what the tokens are a
            view of.
        at: number of the tensor among the block's, for `argument`.
    """

    experts: str
    module: str
    source: str
    at: int = 0

    @property
    def block(self) -> str:
        return self.experts.rpartition(".")[0]


def beside(trace: Trace, routed: ExpertsAt | None) -> list[Beside]:
    """Of the modules that were traced; others stand for equal ones."""
    if routed is None or not routed.section.overlap or routed.section.dispatch == "fused" or not routed.view.on:
        return []
    made = {call.outs[0]: call for call in trace.calls if len(call.outs) == 1}
    starts = [i for i, (path, _) in enumerate(trace.entered) if path in routed.modules]
    found: list[Beside] = []
    for i in starts:
        experts, values = trace.entered[i]
        block = experts.rpartition(".")[0]
        begun = next((j for j in range(i, -1, -1) if trace.entered[j][0] == block), None)
        if begun is None or not values:
            continue
        tokens, given = values[0], trace.entered[begun][1]
        call = made.get(tokens)
        viewed = call.ins[0] if call is not None and call.name in _VIEWS and len(call.ins) == 1 else None
        before = {path for path, _ in trace.entered[begun:i]}
        for module, handed in _siblings(trace, begun, block):
            if within(experts, module) or len(handed) != 1 or module in before:
                continue
            if handed[0] in given:
                found.append(Beside(experts, module, "argument", given.index(handed[0])))
            elif handed[0] == tokens:
                found.append(Beside(experts, module, "tokens"))
            elif handed[0] == viewed:
                found.append(Beside(experts, module, "viewed"))
    # Called twice in a run of the block, or by two runs in different ways: left where it is.
    pairs = [(b.experts, b.module) for b in found]
    return [b for b in found if pairs.count((b.experts, b.module)) == 1]


def _siblings(trace: Trace, begun: int, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Children of `block` that this run of it calls, with what they are handed."""
    for path, values in trace.entered[begun + 1 :]:
        if not within(path, block) or path == block:
            return
        if path.rpartition(".")[0] == block:
            yield path, values


def silent(found: Iterable[Beside], program: Program, bound: Bound) -> tuple[Beside, ...]:
    """Those of which no collective is made, and around which nothing else is done: their place may change."""
    units = (*bound.fsdp_units, *bound.recompute_units, *bound.compile_units)
    loud = {e.module for e in program.events if e.forward or e.backward} | {b.site.module for b in program.boundaries}
    loud |= {path for path, _, _ in program.first_only}
    return tuple(
        b for b in found
        if not any(within(path, b.module) for path in loud) and not any(within(unit, b.module) for unit in units)
    )  # fmt: skip


def moved(events: Sequence[Event], found: Sequence[Beside]) -> tuple[Event, ...]:
    """`events` with the runs of the modules where they are on a rank, behind what experts send first: what a recompute repeats,
    and what is sent before it, depends on which is saved last."""
    out = list(events)
    for b in found:
        at = 0
        while (experts := _next(out, "enter", b.experts, at)) is not None:
            first = _next(out, "operator", b.experts, experts)
            begin = _next(out, "enter", b.module, experts)
            end = None if begin is None else _next(out, "leave", b.module, begin)
            if first is None or begin is None or end is None:
                break
            run = out[begin : end + 1]
            del out[begin : end + 1]
            out[first + 1 : first + 1] = run
            at = end + 1
    return tuple(out)


def _next(events: Sequence[Event], what: str, module: str, start: int) -> int | None:
    return next((i for i in range(start, len(events)) if events[i].what == what and events[i].module == module), None)
