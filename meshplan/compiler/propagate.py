"""Run the lowered program of one rank on fake local tensors, in step with the single-device trace, and derive every layout.

Each torch call of the rank is matched with the same call of the trace: same function, same values in, same arguments up to
what layouts change. A rule then says, axis by axis, what the result is. Where no rule fits, the cheapest redistribution is
inserted and its site recorded; where none is legal, the plan is refused with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler import few_heads, ownership
from meshplan.compiler.capture import (
    HOST_READS,
    Call,
    ModuleStack,
    Ref,
    Trace,
    run_call,
    tensors_in,
)
from meshplan.compiler.edits import Edit, Replacement
from meshplan.compiler.few_heads import sub_axes
from meshplan.compiler.frames import Frames, argument_keys, common_host
from meshplan.compiler.invocations import Invocations
from meshplan.compiler.kinds import A, I, Kind, N, P, Pending, R, normal, replicated, user_letter
from meshplan.compiler.layout import Axis, Info, axis_size, local_shape
from meshplan.compiler.localize import CREATED, SIZED, local_leaves, same_constant, same_index
from meshplan.compiler.match import Choice
from meshplan.compiler.repeats import FullTraceNeeded, Segment, input_signature, like
from meshplan.compiler.sites import Decisions, Move, Site
from meshplan.compiler.strategies import Chooser
from meshplan.compiler.timeline import Timeline
from meshplan.compiler.uses import Decided
from meshplan.errors import PlanError, Where
from meshplan.plan.placements import Partial, Placement, Replicate, Shard
from meshplan.runtime import boundary

RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal normal_ uniform_ "
    "exponential_ geometric_ cauchy_ log_normal_ random_ poisson alpha_dropout feature_dropout dropout1d dropout2d dropout3d "
    "feature_alpha_dropout rrelu gumbel_softmax".split()
)


@dataclass
class Pass:
    """What one propagation produced. `calls` are (caller, callee) module paths, `repeats` (module, the equal one whose
    propagation stands for it), in order; `decided` has one item a call, for the checks."""

    moves: list[tuple[Site, Move, Where | None]] = field(default_factory=list)
    edits: dict[str, dict[int, Edit]] = field(default_factory=dict)
    invocations: Invocations = field(default_factory=Invocations)
    param_use: dict[tuple[str, str, str], Pending] = field(default_factory=dict)
    used_at: dict[tuple[str, str, str], Where | None] = field(default_factory=dict)
    outputs: list[tuple[str, list[Kind], tuple[int, ...], bool]] = field(default_factory=list)
    layouts: list[tuple[str, str, str, tuple[int, ...], list[Kind]]] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    shared: set[Site] = field(default_factory=set)
    calls: set[tuple[str, str]] = field(default_factory=set)
    repeats: list[tuple[str, str]] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)


class Propagation(TorchFunctionMode):
    """One pass over the lowered program. See `propagate.run`."""

    def __init__(
        self,
        trace: Trace,
        axes: list[Axis],
        declared: Callable[[str, str, str], dict[str, Placement]],
        owners: set[str],
        holders: dict[str, set[str]],
        decisions: Decisions,
        chooser: Chooser,
    ) -> None:
        super().__init__()
        self.trace, self.axes, self.declared, self.owners = trace, axes, declared, owners
        self.holders = holders
        self.decisions, self.chooser = decisions, chooser
        spec = chooser.groups.spec
        self.split = {axis.name: spec.degree(sub_axes(axis.name)[0]) for axis in axes if axis.name not in spec.names}
        self.index = {axis.name: k for k, axis in enumerate(axes)}
        self.result = Pass()
        self.stack, self.frames = ModuleStack(), Frames()
        self.infos: dict[int, Info] = {}
        self.keep: list[Any] = []
        self.cursor = self.entered = self.read = 0
        self.paused = False
        self.grouped_calls = 0
        self.segments: dict[int, Segment] = {}
        self.fill: Callable[[str, nn.Module, int], None] = lambda path, module, value: None
        self.memo: dict[tuple[int, str, str, str], tuple[Tensor, Site, Any, list[Move]]] = {}
        self.gathers: list[tuple[Site, str, Pending, Where | None]] = []

    # -- what is known of tensors ------------------------------------------------------------------------------------

    def label(self, t: Tensor, info: Info) -> Tensor:
        self.infos[id(t)] = info
        self.keep.append(t)
        return t

    def relabel(self, new: Tensor, old: Tensor) -> None:
        """`new` is the value that `old` is, in another dtype."""
        known = self.info(old)
        self.label(new, Info(known.value, list(known.kinds), known.data, known.param))

    def info(self, t: Tensor) -> Info:
        found = self.infos.get(id(t))
        if found is None:  # a constant the model holds outside its buffers
            self.label(t, Info(-1, [N] * len(self.axes), False))
            return self.infos[id(t)]
        return found

    def show(self, t: Tensor) -> str:
        """`f32[4, 2048, 512] {dp_shard: S(0), tp: S(2)}` with the global shape."""
        info = self.info(t)
        shape = self.trace.values[info.value].shape if info.value >= 0 else t.shape
        short = str(t.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        kinds = ", ".join(f"{a.name}: {user_letter(k)}" for a, k in zip(self.axes, info.kinds, strict=True))
        return f"{short}{list(shape)} {{{kinds}}}"

    # -- module boundaries -------------------------------------------------------------------------------------------

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        expected = self.trace.entered[self.entered] if self.entered < len(self.trace.entered) else ("(nothing)", ())
        self.entered += 1
        leaves, structure = compat.flatten((args, kwargs))
        values = tuple(self.info(x).value for x in leaves if isinstance(x, Tensor))
        if expected != (path, values):
            raise self.diverged(f"module {path or '(model)'} is called where the single device calls {expected[0] or '(model)'}")
        self.result.timeline.enter(path, any(isinstance(x, Tensor) and x.requires_grad for x in leaves))
        handed = len(self.result.moves)
        keys = argument_keys(module, args, kwargs)
        moved = [
            self.at_site(x, Site("input", path, key), self.declared(path, "input", key)) if isinstance(x, Tensor) else x
            for key, x in zip(keys, leaves, strict=True)
        ]
        if self.frames.stack:
            self.result.calls.add((self.stack.path, path))
        frame = self.frames.enter(path)
        self.result.invocations.entered(frame, handed)
        self.stack.enter(path)
        for key, x in zip(keys, moved, strict=True):
            if isinstance(x, Tensor):
                frame.inputs[id(x)] = key
                self.note(path, "input", key, x)
        return compat.unflatten(moved, structure)

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
                    if path in self.owners:  # a partial result is summed where it was made, unless the plan says otherwise
                        info = self.info(x)
                        undecided = [a for a, k in zip(self.axes, info.kinds, strict=True) if k == P and not a.data]
                        placements = {**{a.name: Replicate() for a in undecided}, **placements}
                    x = self.at_site(x, Site("output", path, key), placements)
                self.note(path, "output", key, x)
            moved.append(x)
        self.frames.leave()
        self.stack.leave()
        self.result.timeline.leave(path, any(isinstance(x, Tensor) and x.requires_grad for x in moved))
        if self.frames.stack:
            for key, x in zip(keys, moved, strict=True):
                if isinstance(x, Tensor):
                    self.frames.produced[id(x)] = (path, key, self.frames.stack[-1].serial)
                    self.keep.append(x)
        return compat.unflatten(moved, structure)

    def grouped(self, path: str, group: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a module that has equals, or repeat what its equal did."""
        number, self.grouped_calls = self.grouped_calls, self.grouped_calls + 1
        planned = self.trace.grouped[number] if number < len(self.trace.grouped) else None
        if planned is None or planned.path != path:
            raise self.diverged(f"it calls {path} there")
        inputs = compat.flatten((args, kwargs))[0]
        given = (input_signature(args, kwargs), tuple(self._handed(x) for x in inputs))
        if planned.of is not None and None in [h for h, x in zip(given[1], inputs, strict=True) if isinstance(x, Tensor)]:
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
        timeline.repeat(first.start, first.end, first.path, path)
        self.result.repeats.append((path, first.path))
        return out

    def _handed(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return None
        info = self.info(x)
        # Who owns an open value's gradient is settled later, for each module on its own.
        return None if any(isinstance(k, Pending) for k in info.kinds) and x.requires_grad else (tuple(info.kinds), info.data)

    def note(self, path: str, side: str, key: str, x: Tensor) -> None:
        info = self.info(x)
        if info.value >= 0:
            self.result.layouts.append((path, side, key, tuple(self.trace.values[info.value].shape), list(info.kinds)))

    def at_site(self, x: Tensor, site: Site, declared: dict[str, Placement]) -> Tensor:
        """Bring `x` to what the plan declares at this site and to what earlier passes decided."""
        decided = self.decisions.moves.get(site, {})
        for k, axis in enumerate(self.axes):
            have = self.info(x).kinds[k]
            if axis.name in decided:
                x = self.to_kind(x, k, decided[axis.name], site)
            elif axis.name in declared:
                place = declared[axis.name]
                if isinstance(place, Shard):
                    kind = normal(place, self.trace.values[self.info(x).value].dim())
                    if have != kind:
                        x = self.hosted(x, k, kind, None, site)
                elif isinstance(place, Replicate) and not replicated(have):
                    x = self.hosted(x, k, R if isinstance(have, Shard) else I, None, site)
                elif isinstance(place, Partial) and have != P:
                    raise PlanError(
                        f"{site} is declared P on {axis.name} but is {self.show(x)}",
                        code="not-partial", module=site.module, legal="R or S(d)",
                    )  # fmt: skip
        return x

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

    # -- redistribution ----------------------------------------------------------------------------------------------

    def to_kind(self, x: Tensor, k: int, want: Kind, site: Site, where: Where | None = None) -> Tensor:
        """Move `x` to kind `want` on axis number `k`, here and now, reporting it at `site`."""
        info, axis = self.info(x), self.axes[k]
        have = info.kinds[k]
        grad = x.requires_grad
        if have == want or (have == N and want in (R, I)):
            return x
        if isinstance(have, Pending):
            if want in (R, I):
                have.need(want)  # type: ignore[arg-type]
                return x
            have.need(R)
            have = R
        if replicated(have) and want in (R, I) and not grad:
            return x
        if isinstance(have, Shard) and have.copies > 1:
            return self.to_kind(self._own_share(x, k, have, site, where), k, want, site, where)
        src = "S" if isinstance(have, Shard) else str(have)
        dst = "S" if isinstance(want, Shard) else str(want)
        if src == "S" and dst == "S":  # through the full value; a shard of one dim does not become one of another in place
            return self.to_kind(self.to_kind(x, k, R, site, where), k, want, site, where)
        if not grad:
            src = "N" if src in "RI" else src
            dst = "N" if dst in "RI" else dst
            want = N if dst == "N" else want
        if src == "A" and dst == "R":
            return self.to_kind(self.to_kind(x, k, I, site, where), k, R, site, where)
        if (src, dst) not in boundary.MOVES or (isinstance(have, Shard) and have.parts) or (isinstance(want, Shard) and want.parts):
            raise PlanError(
                f"{site}: {self.show(x)} cannot become {user_letter(want)} on {axis.name}",
                code="no-redistribution", module=site.module, where=where,
            )  # fmt: skip
        shape = self.trace.values[info.value].shape
        dim = have.dim if isinstance(have, Shard) else want.dim if isinstance(want, Shard) else 0
        size = axis_size(shape, dim, info.kinds, self.axes, k) if "S" in (src, dst) else 0
        if "S" in (src, dst):
            self._no_inner_shards(info, dim, k, site)
        move = Move(axis.name, src, dst, dim, size, have, want)
        mate = boundary.halves(src, dst, axis.group)[1]
        self.paused = True
        out = self.result.timeline.moved(
            site,
            f"{user_letter(have)} -> {user_letter(want)} {axis.name}",
            lambda: boundary.move(x, src, dst, axis.group, dim, size),
            (lambda g: mate(g, axis.group, dim, size)) if grad else None,
            self.show(x),
            where,
        )
        self.paused = False
        if site.side == "input" and src == "S":
            self.result.timeline.gathered(site.module, out, x)
        kinds = list(info.kinds)
        kinds[k] = want
        self._record(site, move, where)
        return self.label(out, Info(info.value, kinds, info.data, info.param, info.source))

    def _own_share(self, x: Tensor, k: int, have: Shard, site: Site, where: Where | None) -> Tensor:
        """Of a shard that neighbouring ranks have copies of, this rank's own part: replicated becomes sharded among them."""
        info, axis = self.info(x), self.axes[k]
        group = self.chooser.groups.group(sub_axes(axis.name)[1])
        size = axis_size(self.trace.values[info.value].shape, have.dim, info.kinds, self.axes, k + 1)
        src = "R" if x.requires_grad else "N"
        move = Move(sub_axes(axis.name)[1], src, "S", have.dim, size, have, Shard(have.dim))
        self.paused = True
        out = self.result.timeline.moved(
            site, f"{have} -> {move.dst_kind} {axis.name}", lambda: boundary.move(x, src, "S", group, have.dim, size),
            (lambda g: boundary.MOVES[src, "S"][1](g, group, have.dim, size)) if x.requires_grad else None, self.show(x), where,
        )  # fmt: skip
        self.paused = False
        kinds = list(info.kinds)
        kinds[k] = Shard(have.dim)
        self._record(site, move, where)
        return self.label(out, Info(info.value, kinds, info.data, info.param, info.source))

    def _no_inner_shards(self, info: Info, dim: int, k: int, site: Site) -> None:
        # Gathering an outer axis while an inner one still splits the dim would interleave the pieces.
        for j in range(k + 1, len(self.axes)):
            kind = info.kinds[j]
            if isinstance(kind, Shard) and kind.dim == dim:
                raise PlanError(
                    f"{site}: dim {dim} is split by {self.axes[k].name} and, inside it, by {self.axes[j].name}; "
                    f"{self.axes[k].name} alone cannot change", code="nested-shards", module=site.module,
                )  # fmt: skip

    def hosted(self, x: Tensor, k: int, want: Kind, where: Where | None, site: Site | None = None, leaf: int = 0) -> Tensor:
        """A redistribution that an op or a declaration asks for: done once a tensor, hosted where it costs least."""
        axis = self.axes[k]
        if want == R and self.info(x).kinds[k] in (P, A):
            want = I  # a sum is whole on every rank; whoever then uses it in a split computation asks for R
        here = site or self._host(x, leaf)
        key = (id(x), axis.name, str(want), here.module if here.side == "param" else "")
        if key in self.memo:
            made, first, frames, moves = self.memo[key]
            self._share(x, k, want, first, here, frames, moves, where)
            return made
        started = len(self.result.moves)
        have = self.info(x).kinds[k]
        if isinstance(have, Shard) and want == R:
            out = self._gather(x, k, here, where)
        elif replicated(have) and want == I:
            out = self.to_kind(x, k, I, here, where)
        else:
            out = self.to_kind(x, k, want, here, where)
        self.memo[key] = (out, here, self.frames.snapshot(), [m for _, m, _ in self.result.moves[started:]])
        self.keep.append(x)
        if site is None and here.side in ("input", "output") and out is not x and not (isinstance(have, Shard) and want == R):
            self.decisions.add(here, axis.name, self.info(out).kinds[k], where)
        return out

    def _gather(self, x: Tensor, k: int, site: Site, where: Where | None) -> Tensor:
        axis = self.axes[k].name
        settled = self.decisions.gathered.get((site, axis))
        out = self.to_kind(x, k, settled or R, site, where)
        if settled is None and x.requires_grad:
            # Whether the gradient comes back partial or whole is up to whoever uses the gathered value.
            pending = Pending((site, axis), True)
            self.info(out).kinds[k] = pending
            self.gathers.append((site, axis, pending, where))
        return out

    def _host(self, x: Tensor, leaf: int) -> Site:
        info = self.info(x)
        if self.frames.stack and id(x) in self.frames.stack[-1].inputs:
            return Site("input", self.stack.path, self.frames.stack[-1].inputs[id(x)])
        if info.param is not None and self.stack.path in self.holders[info.param]:
            return Site("param", self.stack.path, info.param)
        produced = self.frames.output_of(x)
        if produced and P in info.kinds:
            return Site("output", *produced)
        ordinal = self.trace.calls[self.cursor].ordinal if self.cursor < len(self.trace.calls) else 0
        return Site("call", self.stack.path, f"{ordinal}:{leaf}")

    def _share(
        self, x: Tensor, k: int, want: Kind, first: Site, here: Site, frames: Any, moves: list[Move], where: Where | None
    ) -> None:
        """A second use of the same redistribution: host it once, at the nearest common module that was handed the tensor;
        where there is none, the first site to run keeps the result for the others."""
        started = next((f.serial for f in reversed(frames) if f.path == here.module), None)
        if first == here and started in (None, self.result.invocations.current(here.module, self.frames.stack)):
            return
        host = common_host(x, frames, self.frames.snapshot())
        if host is not None:
            site, axis = Site("input", *host), self.axes[k].name
            if site != first:
                gathered = isinstance(self.info(x).kinds[k], Shard) and want in (R, I)
                kind = self.decisions.gathered.get((first, axis), R) if gathered else want
                self.decisions.add(site, axis, kind, where)
            return
        self.result.shared |= {first, here}
        for move in moves:
            self._record(here, move, where)

    def _record(self, site: Site, move: Move, where: Where | None) -> None:
        self.result.moves.append((site, move, where))
        self.result.invocations.owners.append(self.result.invocations.current(site.module, self.frames.stack))

    # -- calls -------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        rec = self.trace.calls[self.cursor] if self.cursor < len(self.trace.calls) else None
        if rec is None or rec.func != func:
            out = run_call(func, args, kwargs, self.stack.path)
            self._check_unrecorded(func, out)
            return out
        return self.recorded(rec, args, kwargs)

    def _check_unrecorded(self, func: Callable[..., Any], out: Any) -> None:
        from meshplan.compiler.capture import is_recorded

        if is_recorded(func, out):
            raise self.diverged(f"it calls {getattr(func, '__name__', func)} there")
        if getattr(func, "__name__", "") in HOST_READS:
            expected = self.trace.reads[self.read] if self.read < len(self.trace.reads) else None
            self.read += 1
            if expected is None or expected[0] != func.__name__ or not same_constant(expected[1], out):
                raise self.diverged(f"it reads {out!r} on the host there")

    def recorded(self, rec: Call, args: Any, kwargs: Any) -> Any:
        leaves, structure = compat.flatten((args, kwargs))
        slots = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        expected = [i for i, x in enumerate(rec.leaves) if isinstance(x, Ref)]
        if len(slots) != len(expected):
            raise self.diverged(f"{rec.name} has {len(slots)} tensor arguments there")
        for i, j in zip(slots, expected, strict=True):
            info = self.info(leaves[i])
            if info.value == -1:
                info.value = rec.leaves[j].value
            if info.value != rec.leaves[j].value:
                raise self.diverged(f"{rec.name} uses another tensor there")
        if rec.name in RANDOM:
            raise PlanError(
                f"{rec.name} draws from the default generator, which differs between ranks", code="random-op",
                where=rec.where, module=rec.module, legal="dropout, or random numbers drawn outside the model",
            )  # fmt: skip
        tensors = [leaves[i] for i in slots]
        if not rec.in_place and not any(map(compat.is_fake, tensors)):
            out = self._attempt(rec, args, kwargs)
            if self._same_values(rec, out):
                self.cursor += 1
                self.stack.next_ordinal()
                neutral: list[list[Kind]] = [[N] * len(self.axes) for _ in rec.outs]
                self._label_outputs(rec, out, args, neutral, False, [])
                return out
        self._open_parameters(tensors, rec.where)
        choices, tensors, converts = self._choose(rec, tensors)
        for i, t in zip(slots, tensors, strict=True):
            leaves[i] = t
        infos = [self.info(t) for t in tensors]
        requires = [t.requires_grad for t in tensors]
        whole = {
            k: ownership.combine([i.kinds[k] for i in infos], requires, [i.data for i in infos])
            for k in range(len(self.axes)) if choices[k] is None
        }  # fmt: skip
        out_kinds = self._out_kinds(rec, choices, whole)
        replacement = self._replacement(rec, choices)
        whole_kinds = [list(kinds) for kinds in out_kinds]
        run_leaves, run_structure, edited, sized = self._local_arguments(rec, leaves, structure, out_kinds)
        for k in {k for old, new in zip(whole_kinds, out_kinds, strict=True) for k in range(len(new)) if old[k] != new[k]}:
            # Sharded by its own size alone: each rank now uses the whole value in its own way.
            tensors = self._used_apart(rec, tensors, k, converts)
        if converts:
            tensor = iter(tensors)
            run_leaves = [next(tensor) if isinstance(x, Tensor) else x for x in run_leaves]
        taken = tuple(tuple(self.info(t).kinds) for t in tensors)
        self.cursor += 1
        self.stack.next_ordinal()
        a, kw = compat.unflatten(run_leaves, run_structure)
        if replacement is not None:
            with self.result.timeline.operator(rec, self.stack.path):
                out = self.chooser.run_replacement(replacement, rec, a, kw, self.axes)
        else:
            out = run_call(rec.func, a, kw, self.stack.path)
        self._label_outputs(rec, out, a, out_kinds, any(i.data for i in infos), infos)
        made = tuple(tuple(self.info(t).kinds) for t in tensors_in(a[0] if rec.in_place else out))
        operators = tuple(c.strategy.replace if c is not None else None for c in choices)
        self.result.decided.append(Decided(rec, taken, made, operators))
        if edited or replacement or converts:
            edit = Edit(rec.ordinal, rec.name, sized if edited else None, tuple(converts), replacement, rec.where)
            self.result.invocations.edits.append((self.frames.stack[-1].serial, rec.module, edit))
        return out

    def _same_values(self, rec: Call, out: Any) -> bool:
        """Whether a constant (computed for real: see `run_call`) came out here as on the single device, though perhaps
        from this rank's part of another constant: `(positions == 0).all()` is one truth on every rank."""
        made = tensors_in(out)
        known = [self.trace.values[v] for v in rec.outs]
        if len(made) != len(known) or any(map(compat.is_fake, [*made, *known])):
            return False
        with compat.without_fake_mode():
            return all(torch.equal(a, b) for a, b in zip(made, known, strict=True))

    def _open_parameters(self, tensors: list[Tensor], where: Where | None) -> None:
        # Each module's use of a replicated parameter settles its own gradient ownership.
        for t in tensors:
            info = self.info(t)
            if info.param is None or not t.requires_grad:
                continue
            for k, axis in enumerate(self.axes):
                if replicated(info.kinds[k]):
                    use = (self.stack.path, info.param, axis.name)
                    if use not in self.result.param_use:
                        self.result.param_use[use] = Pending(use, False)
                        self.result.used_at[use] = where
                    info.kinds[k] = self.result.param_use[use].find()

    def _choose(self, rec: Call, tensors: list[Tensor]) -> tuple[list[Choice | None], list[Tensor], list[tuple[int, Move]]]:
        choices: list[Choice | None] = []
        converts: list[tuple[int, Move]] = []
        for k, axis in enumerate(self.axes):
            kinds = [self.info(t).kinds[k] for t in tensors]
            if all(replicated(kind) for kind in kinds):
                choices.append(None)
                fixed = ownership.to_invariant(kinds, [t.requires_grad for t in tensors])
                for j in fixed:
                    tensors[j] = self._converted(tensors[j], k, I, rec, j, converts)
                continue
            params = [self.info(t).param is not None for t in tensors]
            choice = self.chooser.choose(rec, kinds, params, axis.degree, [t.requires_grad for t in tensors])
            if choice is None:
                raise self.refuse(rec, tensors, axis)
            self._check_heads(rec, tensors, axis, kinds, choice)
            for j, want in enumerate(choice.wanted):
                if want is not None and not (want == R and replicated(kinds[j])):
                    tensors[j] = self._converted(tensors[j], k, want, rec, j, converts)
            if all(replicated(self.info(t).kinds[k]) for t in tensors):
                choices.append(None)
                fixed = ownership.to_invariant([self.info(t).kinds[k] for t in tensors], [t.requires_grad for t in tensors])
                for j in fixed:
                    tensors[j] = self._converted(tensors[j], k, I, rec, j, converts)
                continue
            for j, t in enumerate(tensors):
                kind = self.info(t).kinds[k]
                if not t.requires_grad:
                    continue
                if isinstance(kind, Pending):
                    kind.need(R)
                elif kind == I:
                    tensors[j] = self._converted(t, k, R, rec, j, converts)
            choices.append(choice)
        return choices, tensors, converts

    def _check_heads(self, rec: Call, tensors: list[Tensor], axis: Axis, kinds: list[Kind], choice: Choice) -> None:
        """Before a projection is gathered because its heads are too few for the axis: see few_heads.py."""
        if choice.wanted[0] != R or len(tensors) != 1:
            return
        source = self.info(tensors[0]).source
        split = few_heads.needed(rec.name, self.trace.values[rec.ins[0]], self.trace.values[rec.outs[0]], kinds[0], axis, source)
        if split is not None and self.split.get(axis.name, split.pieces) == split.pieces:
            raise few_heads.SplitNeeded(split)

    def _source(self, rec: Call, infos: list[Info], kinds: list[Kind]) -> frozenset[str]:
        if not any(isinstance(k, Shard) for k, a in zip(kinds, self.axes, strict=True) if not a.data):
            return frozenset()
        own = {i.param for i in infos if i.param and any(isinstance(k, Shard) for k in i.kinds)}
        return frozenset(own) or frozenset().union(*(i.source for i in infos))  # type: ignore[arg-type]

    def _used_apart(self, rec: Call, tensors: list[Tensor], k: int, converts: list[tuple[int, Move]]) -> list[Tensor]:
        """The replicated `tensors` with gradients that are partial over axis number `k`."""
        out = []
        for j, t in enumerate(tensors):
            kind = self.info(t).kinds[k]
            if t.requires_grad and isinstance(kind, Pending):
                kind.need(R)
            out.append(self._converted(t, k, R, rec, j, converts) if t.requires_grad and kind == I else t)
        return out

    def _converted(self, t: Tensor, k: int, want: Kind, rec: Call, j: int, converts: list[tuple[int, Move]]) -> Tensor:
        before = len(self.result.moves)
        leaf = [i for i, x in enumerate(rec.leaves) if isinstance(x, Ref)][j]
        out = self.hosted(t, k, want, rec.where, leaf=leaf)
        for site, move, _ in self.result.moves[before:]:
            if site.side == "call":
                converts.append((leaf, move))
        return out

    def _out_kinds(self, rec: Call, choices: list[Choice | None], whole: dict[int, Kind]) -> list[list[Kind]]:
        shapes = [self.trace.values[v].shape for v in rec.outs]
        return [
            [normal(choices[k].outs[o], len(shapes[o])) if choices[k] is not None else whole[k] for k in range(len(self.axes))]  # type: ignore[union-attr]
            for o in range(len(rec.outs))
        ]  # fmt: skip

    def _replacement(self, rec: Call, choices: list[Choice | None]) -> Replacement | None:
        names = {c.strategy.replace for c in choices if c is not None and c.strategy.replace}
        chosen = {self.axes[k].name: c.strategy for k, c in enumerate(choices) if c is not None}
        return self.chooser.replacement(rec, names, chosen, self.axes)

    def _local_arguments(self, rec: Call, leaves: list[Any], structure: Any, out_kinds: list[list[Kind]]):
        """This rank's arguments: the user's own where they already mean the same, else the single device's, made local."""
        shapes = [self.trace.values[v].shape for v in rec.outs]
        local = [local_shape(s, k, self.axes) for s, k in zip(shapes, out_kinds, strict=True)]
        if rec.name in SIZED | CREATED | {"unflatten", "split", "split_with_sizes", "tensor_split"}:
            own = self._try_own(rec, leaves, structure)
            if own is not None and [tuple(s) for s in own] == local:
                return leaves, structure, False, None
            widened = self._widened(rec, leaves, own, shapes, out_kinds) if own is not None else False
            if widened:
                return leaves, structure, False, None
            dims = self._split_sizes(rec, local)
            args, kwargs = local_leaves(rec.name, [x.value if isinstance(x, Ref) else x for x in rec.leaves], rec.structure, local, dims)
            flat, new_structure = compat.flatten((args, kwargs))
            run = list(flat)
            refs = [i for i, x in enumerate(rec.leaves) if isinstance(x, Ref)]
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            for i, t in zip(refs, tensors, strict=True):
                run[i] = t
            return run, new_structure, True, _slotted(run, new_structure)
        if rec.name == "__getitem__":
            x = leaves[0]
            shape = self.trace.values[rec.leaves[0].value].shape
            index_a = compat.unflatten(list(rec.leaves), rec.structure)[0][1]
            index_a = _with_tensors(index_a, self.trace)
            index_b = compat.unflatten(list(leaves), structure)[0][1]
            if same_index(index_a, tuple(shape), index_b, tuple(x.shape)):
                return leaves, structure, False, None
        run = [x if isinstance(x, Tensor) else y for x, y in zip(leaves, rec.leaves, strict=True)] if len(leaves) == len(rec.leaves) else None
        if run is None:
            raise self.diverged(f"{rec.name} has other arguments there")
        same = all(isinstance(x, Tensor) or same_constant(x, y) for x, y in zip(leaves, rec.leaves, strict=True))
        if same:
            return leaves, structure, False, None
        return run, rec.structure, True, _slotted(run, rec.structure)

    def _split_sizes(self, rec: Call, local: list[tuple[int, ...]]) -> list[int] | None:
        if "split" not in rec.name:
            return None
        args, kwargs = compat.unflatten(list(rec.leaves), rec.structure)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        return [shape[dim] for shape in local]

    def _try_own(self, rec: Call, leaves: list[Any], structure: Any) -> list[tuple[int, ...]] | None:
        out = self._attempt(rec, *compat.unflatten(list(leaves), structure))
        return None if out is None else [tuple(t.shape) for t in tensors_in(out)]

    def _attempt(self, rec: Call, args: Any, kwargs: Any) -> Any:
        """The call with the user's own arguments; None where they do not fit this rank's shapes."""
        try:
            with torch.no_grad(), compat.quiet_fake_tensors():
                return run_call(rec.func, args, kwargs, self.stack.path)
        except (RuntimeError, ValueError):
            return None

    def _widened(self, rec: Call, leaves: list[Any], own: list[tuple[int, ...]], shapes: list[Any], out_kinds: list[list[Kind]]) -> bool:
        """A constant made, or a dim expanded, at this rank's size: all its shards are equal, so it may count as sharded."""
        if rec.name not in CREATED | {"expand", "broadcast_to"} or len(own) != 1 or len(own[0]) != len(shapes[0]):
            return False
        x = next((t for t in leaves if isinstance(t, Tensor)), None) if rec.name in ("expand", "broadcast_to") else None
        for d, (mine, full) in enumerate(zip(own[0], shapes[0], strict=True)):
            if mine == full:
                continue
            if x is not None:
                held = d - (len(own[0]) - x.dim())
                if held >= 0 and x.shape[held] != 1:
                    return False
            order = sorted(range(len(self.axes)), key=lambda k: not self.axes[k].data)
            left = full
            for k in order if d == 0 else [*order[::-1]]:
                if left != mine and left % self.axes[k].degree == 0 and replicated(out_kinds[0][k]) and left // self.axes[k].degree >= mine:
                    left //= self.axes[k].degree
                    out_kinds[0][k] = Shard(d)
            if left != mine:
                return False
        return True

    def _label_outputs(self, rec: Call, out: Any, args: Any, out_kinds: list[list[Kind]], data: bool, infos: list[Info]) -> None:
        written = args[0] if rec.in_place else out
        made = [t for t in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(t, Tensor)]
        if len(made) != len(rec.outs):
            raise self.diverged(f"{rec.name} returns {len(made)} tensors there")
        for t, value, kinds in zip(made, rec.outs, out_kinds, strict=True):
            want = local_shape(self.trace.values[value].shape, kinds, self.axes)
            if tuple(t.shape) != want:
                raise PlanError(
                    f"{rec.name} gives {list(t.shape)} on this rank where its layout says {list(want)}",
                    code="local-shape", where=rec.where, module=rec.module,
                )  # fmt: skip
            if not t.requires_grad:
                kinds = [N if replicated(k) else k for k in kinds]
            if rec.in_place and id(t) in self.infos:
                self._check_in_place(rec, self.infos[id(t)], kinds)
            self.label(t, Info(value, kinds, data, None, self._source(rec, infos, kinds)))

    def _check_in_place(self, rec: Call, before: Info, kinds: list[Kind]) -> None:
        for axis, old, new in zip(self.axes, before.kinds, kinds, strict=True):
            if old != new and not (replicated(old) and replicated(new)):
                raise PlanError(
                    f"{rec.name} writes {user_letter(new)} on {axis.name} into a tensor that is {user_letter(old)}",
                    code="in-place", where=rec.where, module=rec.module, legal="an out-of-place operation",
                )  # fmt: skip

    # -- errors ------------------------------------------------------------------------------------------------------

    def diverged(self, what: str) -> PlanError:
        rec = self.trace.calls[self.cursor] if self.cursor < len(self.trace.calls) else None
        where = rec.where if rec else None
        expected = f"; the single device calls {rec.name}" if rec else ""
        return PlanError(
            f"on this rank the program of {self.stack.path or 'the model'} differs from the single device's: {what}{expected}",
            code="diverged", where=where, module=self.stack.path,
            legal="Python control flow that does not depend on sizes a plan splits",
        )  # fmt: skip

    def refuse(self, rec: Call, tensors: list[Tensor], axis: Axis) -> PlanError:
        shown = ", ".join(self.show(t) for t in tensors)
        return PlanError(
            f"{rec.name}({shown}) cannot run on shards over {axis.name} (degree {axis.degree}), and a sharded parameter is never gathered for it",
            code="no-rule", where=rec.where, module=rec.module,
            legal="another dim for that parameter, or R",
        )  # fmt: skip


def _slotted(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], Any, frozenset[int]]:
    """Arguments as a template: constants, and the places where tensors go."""
    slots = frozenset(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    return tuple(None if i in slots else x for i, x in enumerate(leaves)), structure, slots


def _with_tensors(index: Any, trace: Trace) -> Any:
    if isinstance(index, tuple):
        return tuple(trace.values[i.value] if isinstance(i, Ref) else i for i in index)
    return trace.values[index.value] if isinstance(index, Ref) else index


__all__ = ["Pass", "Propagation"]
