"""Run the lowered program of one rank on fake local tensors, in step with the single-device trace, and derive every layout.

Each torch call of the rank is matched with the same call of the trace: same function, same values in, same arguments up to
what layouts change. A rule then says, axis by axis, what the result is. Where no rule fits, the cheapest redistribution is
inserted and its site recorded; where none is legal, the plan is refused with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler.calls import Calls
from meshplan.compiler.capture import HOST_READS, is_recorded, run_call, tensors_in
from meshplan.compiler.edits import Edit
from meshplan.compiler.frames import argument_keys
from meshplan.compiler.hooks import ON_TENSORS, gradient_hook
from meshplan.compiler.kinds import A, I, P, Pending, R, replicated
from meshplan.compiler.known import Pass
from meshplan.compiler.layout import Info
from meshplan.compiler.localize import same_constant
from meshplan.compiler.repeats import FullTraceNeeded, Segment, can_stand_for_others, input_signature, like
from meshplan.compiler.sites import Move, Site
from meshplan.compiler.source import call_site
from meshplan.errors import PlanError
from meshplan.plan.placements import Placement, Replicate, Shard


class Propagation(Calls, TorchFunctionMode):
    """One pass over the lowered program: the hooks that stand around modules, and the mode that sees every torch call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        TorchFunctionMode.__init__(self)
        Calls.__init__(self, *args, **kwargs)

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        expected = self.trace.entered[self.entered] if self.entered < len(self.trace.entered) else ("(nothing)", ())
        self.entered += 1
        leaves, structure = compat.flatten((args, kwargs))
        given = [self.info(x) for x in leaves if isinstance(x, Tensor)]
        for info, value in zip(given, expected[1], strict=False):
            if value in info.also:
                self.seen_as(info, value)
        values = tuple(info.value for info in given)
        if expected != (path, values):
            raise self.diverged(
                f"module {path or '(model)'} is called where the single device calls {expected[0] or '(model)'}"
            )
        keys = argument_keys(module, args, kwargs)
        leaves = self._alike(path, keys, leaves)
        self.result.timeline.enter(path, [x for x in leaves if isinstance(x, Tensor)])
        handed = len(self.result.moves)
        moved = self._at_inputs(path, keys, leaves)
        if self.frames.stack:
            self.result.calls.add((self.stack.path, path))
        frame = self.frames.enter(path)
        hushed = [key for key, x in zip(keys, leaves, strict=True) if isinstance(x, Tensor) and not x.requires_grad]
        self.result.invocations.entered(frame, handed, hushed, not torch.is_grad_enabled())
        self.stack.enter(path)
        for key, x in zip(keys, moved, strict=True):
            if isinstance(x, Tensor):
                frame.inputs.setdefault(id(x), key)
                self.note(path, "input", key, x)
        return compat.unflatten(moved, structure)

    def _alike(self, path: str, keys: list[str], leaves: list[Any]) -> list[Any]:
        """What the caller hands over, made whole where the module's calls would differ otherwise."""
        if not self.frames.stack:
            return leaves
        caller = self.frames.stack[-1]
        caller.children += 1
        out, converts = list(leaves), []
        for i, (key, x) in enumerate(zip(keys, leaves, strict=True)):
            for k, axis in enumerate(self.axes if isinstance(x, Tensor) else ()):
                if (path, key, axis.name) in self.decisions.alike:
                    before = len(self.result.moves)
                    out[i] = self.to_kind(out[i], k, I, Site("call", self.stack.path, f"{-caller.children}:{i}"))
                    converts += [(i, move) for _, move, _ in self.result.moves[before:]]
        if converts:
            edit = Edit(-caller.children, path, None, tuple(converts), None, None)
            self.result.invocations.edits.append((caller.serial, self.stack.path, edit))
        given = {key: list(self.info(x).kinds) for key, x in zip(keys, out, strict=True) if isinstance(x, Tensor)}
        self.result.invocations.given.setdefault(path, []).append(given)
        return out

    def _at_inputs(self, path: str, keys: list[str], leaves: list[Any]) -> list[Any]:
        """What a module is handed, moved. A tensor handed over twice (`attention(x, x, x)`) stays one tensor."""
        moved: list[Any] = []
        seen: dict[int, tuple[Site, Tensor, list[Move]]] = {}
        for key, x in zip(keys, leaves, strict=True):
            if not isinstance(x, Tensor):
                moved.append(x)
                continue
            site, declared, before = Site("input", path, key), self.declared(path, "input", key), len(self.result.moves)
            if id(x) in seen and not declared:
                first, made, moves = seen[id(x)]
                if moves:
                    self.result.shared |= {first, site}
                for move in moves:
                    self._record(site, move, None)
                moved.append(made)
                continue
            moved.append(self.at_site(x, site, declared))
            seen.setdefault(id(x), (site, moved[-1], [m for _, m, _ in self.result.moves[before:]]))
        return moved

    def after(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        leaves, structure = compat.flatten(out)
        keys = [key for key, _ in compat.flatten_with_path(out)]
        moved = []
        for key, x in zip(keys, leaves, strict=True):
            if isinstance(x, Tensor):
                placements = self.declared(path, "output", key)
                if path == "":
                    x = self.at_root(x, Site("output", path, key), placements)
                else:
                    if (
                        path in self.owners
                    ):  # a partial result is summed where it was made, unless the plan says otherwise
                        info = self.info(x)
                        undecided = [a for a, k in zip(self.axes, info.kinds, strict=True) if k == P and not a.data]
                        placements = {**{a.name: Replicate() for a in undecided}, **placements}
                    x = self.at_site(x, Site("output", path, key), placements)
                self.note(path, "output", key, x)
            moved.append(x)
        self.frames.leave()
        self.stack.leave()
        self.result.timeline.leave(path, [x for x in moved if isinstance(x, Tensor)])
        if self.frames.stack:
            for key, x in zip(keys, moved, strict=True):
                if isinstance(x, Tensor):
                    self.frames.produced[id(x)] = (path, key, self.frames.stack[-1].serial)
                    self.keep.append(x)
        return compat.unflatten(moved, structure)

    def grouped(
        self, path: str, group: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the forward of a module that has equals, or repeat what its equal did."""
        if not can_stand_for_others(args, kwargs):
            return forward(*args, **kwargs)
        number, self.grouped_calls = self.grouped_calls, self.grouped_calls + 1
        planned = self.trace.grouped[number] if number < len(self.trace.grouped) else None
        if planned is None or planned.path != path:
            raise self.diverged(f"it calls {path} there")
        inputs = compat.flatten((args, kwargs))[0]
        given = (input_signature(args, kwargs), tuple(self._handed(x) for x in inputs))
        if planned.of is not None and None in [
            h for h, x in zip(given[1], inputs, strict=True) if isinstance(x, Tensor)
        ]:
            raise FullTraceNeeded(path)
        timeline = self.result.timeline
        if planned.of is None:
            if planned.first_value >= 0:
                self.paused = True
                self.fill(path, module, planned.first_value)
                self.paused = False
            segment = Segment(number, path, inputs, given, start=len(timeline.events))
            segment.out = forward(*args, **kwargs)
            segment.end = len(timeline.events)
            segment.infos = [self.info(t) for t in tensors_in(segment.out)]
            self.segments[number] = segment
            return segment.out
        first = self.segments[planned.of]
        if given != first.given or any(isinstance(k, Pending) for i in first.infos for k in i.kinds):
            raise FullTraceNeeded(path)
        self.paused = True
        out = like(first.out, first.inputs, inputs)
        self.paused = False
        for t, old, value in zip(tensors_in(out), first.infos, planned.outs, strict=True):
            if id(t) not in self.infos:
                self.label(t, Info(value, list(old.kinds), old.data))
        held = [id(x) for x in first.inputs]
        made = [(a, b) for a, b in zip(tensors_in(first.out), tensors_in(out), strict=True) if id(a) not in held]
        timeline.repeat(first.start, first.end, first.path, path, made)
        self.result.repeats.append((path, first.path))
        return out

    def _handed(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return None
        info = self.info(x)
        # Who owns an open value's gradient is settled later, for each module on its own.
        return (
            None
            if any(isinstance(k, Pending) for k in info.kinds) and x.requires_grad
            else (tuple(info.kinds), info.data)
        )

    def at_root(self, x: Tensor, site: Site, declared: dict[str, Placement]) -> Tensor:
        """The contract of the model's own outputs: data axes keep their shards, other axes end replicated, and a
        floating 0-dim output is a mean over data axes."""
        x = self.at_site(x, site, declared)
        info = self.info(x)
        scalar = x.dim() == 0 and x.dtype.is_floating_point
        for k, axis in enumerate(self.axes):
            kind = self.info(x).kinds[k]
            if axis.name in declared and not isinstance(declared[axis.name], Replicate):
                continue
            if axis.data and (isinstance(kind, Shard) or (scalar and kind == A)):
                continue
            if axis.data and scalar and kind == P:
                x = self.to_kind(x, k, A, site)
            elif not replicated(kind) or (kind == R and x.requires_grad and not axis.data):
                x = self.to_kind(x, k, I, site)
            elif isinstance(kind, Pending) and not axis.data:
                kind.need(I)
        shape = tuple(self.trace.values[info.value].shape)
        self.result.outputs.append((site.key, list(self.info(x).kinds), shape, scalar))
        return x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        rec = self.trace.calls[self.cursor] if self.cursor < len(self.trace.calls) else None
        if rec is None or rec.func != func:
            if getattr(func, "__name__", "") == "__get__" and not isinstance(seen := func(*args, **kwargs), Tensor):
                return seen
            if self.spared(func):
                return self.recorded(self.trace.calls[self.cursor], args, kwargs)
            out = run_call(func, args, kwargs, self.stack.path)
            self._check_unrecorded(func, out)
            if getattr(func, "__name__", "") == "__set__" and any(a.degree > 1 for a in self.axes):
                raise self._assigns(func, args)
            if getattr(func, "__name__", "") in ON_TENSORS and any(k != I for k in self.info(args[0]).kinds):
                raise gradient_hook(f"a hook on {self.show(args[0])}", self.stack.path, call_site())
            return out
        return self.recorded(rec, args, kwargs)

    def _assigns(self, func: Any, args: Any) -> PlanError:
        return PlanError(
            f"the forward assigns to .{getattr(func.__self__, '__name__', 'data')} of {self.show(args[0])}, unseen by others",
            code="in-place", where=call_site(), module=self.stack.path,
            legal="an operation in place under torch.no_grad(), such as p.copy_(...)",
        )  # fmt: skip

    def _check_unrecorded(self, func: Callable[..., Any], out: Any) -> None:
        if is_recorded(func, out):
            raise self.diverged(f"it calls {getattr(func, '__name__', func)} there")
        if getattr(func, "__name__", "") in HOST_READS:
            expected = self.trace.reads[self.read] if self.read < len(self.trace.reads) else None
            self.read += 1
            if expected is None or expected[0] != func.__name__ or not same_constant(expected[1], out):
                raise self.diverged(f"it reads {out!r} on the host there")


__all__ = ["Pass", "Propagation"]
