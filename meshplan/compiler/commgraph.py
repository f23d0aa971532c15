"""The comm graph: every collective of one step in program order, worked out from the forward's timeline.

Autograd runs nodes in the reverse of their creation, so a boundary's mate comes when the walk back over the timeline
passes it; FSDP2's hooks fire where the walk enters and leaves its units; a recomputed unit's forward repeats, up to the last
tensor it saved, where the walk first needs something saved in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshplan.compiler.fsdp_cuts import (
    by_reduction,
    expert_axes,
    fsdp_cuts,
    fsdp_paths,
    kept_whole,
    reached_apart,
    sharded_by_fsdp,
    sharded_experts,
)
from meshplan.compiler.fsdp_schedule import FsdpPolicy, FsdpUnit, Point, fsdp_events
from meshplan.compiler.fsdp_units import fsdp_units
from meshplan.compiler.lowered import Core, ParamPlan
from meshplan.compiler.timeline import Event, Sent
from meshplan.mesh.build import busy_axes, group_label
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.runtime.comm import chunk_sizes
from meshplan.runtime.recorder import wire_bytes


@dataclass(frozen=True)
class Collective:
    """One collective of a step. `what` is the boundary's side, `fsdp`, `operator` or `gradients`. Of a `routed` one the elements
    are those of an even routing."""

    phase: str
    op: str
    axis: str
    ranks_per_group: int
    dtype: str
    elements: int
    module: str
    tensor: str
    what: str
    where: str
    routed: bool = False

    @property
    def bytes(self) -> int:
        return self.elements * getattr(torch, self.dtype).itemsize

    def to_json(self) -> dict[str, object]:
        return {
            "phase": self.phase, "op": self.op, "axis": self.axis, "ranks_per_group": self.ranks_per_group, "count": 1,
            "dtype": self.dtype, "elements": self.elements, "bytes": self.bytes,
            "wire_bytes": wire_bytes(self.op, self.bytes, self.ranks_per_group), "module": self.module, "tensor": self.tensor,
            "what": self.what, "where": self.where, **({"routed": True} if self.routed else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What the walk needs beside the timeline: FSDP's units and policy (None without), and the recomputed units."""

    units: tuple[FsdpUnit, ...]
    policy: FsdpPolicy | None
    recompute: frozenset[str]


def fsdp_of(model: nn.Module, core: Core, rank: int = 0) -> tuple[tuple[FsdpUnit, ...], FsdpPolicy | None]:
    """The FSDP units of a core as `rank` has them, and their policy; none where data axes shard no parameters."""
    section, spec = core.bound.plan.fsdp, core.spec
    if section is None or not sharded_by_fsdp(core):
        return (), None
    shard, copies = spec.degree("dp_shard", "cp"), spec.degree("dp_replicate")
    by_id = {id(p): name for name, p in model.named_parameters()}
    cuts = fsdp_cuts(core)
    units = fsdp_units(
        model, fsdp_paths(core), shard=shard, strategy=section.strategy,  # type: ignore[arg-type]
        reshard_after_forward=section.reshard_after_forward, shard_dim_of=lambda p: cuts[by_id[id(p)]],
        local_shape_of=lambda name, p: local_param_shape(core.params[name], spec, rank),
        unused=frozenset(n for n, p in core.params.items() if not p.reached), whole=kept_whole(core),
    )  # fmt: skip
    own = sharded_experts(core)
    if own:
        axes = expert_axes(core)
        label = group_label(spec, axes)
        units = tuple(replace(u, shard=spec.degree(*axes), axis=label) if u.path in own else u for u in units)
    strategy: Any = section.strategy  # the plan has checked that it is one of FSDP's
    replicas = copies if copies > 1 else None
    policy = FsdpPolicy(strategy, shard, replicas, section.param_dtype, section.reduce_dtype)
    return units, policy


def local_param_shape(param: ParamPlan, spec: MeshSpec, rank: int) -> tuple[int, ...]:
    """Shape of a parameter on `rank` after tensor parallelism, before FSDP."""
    shape = list(param.shape)
    for axis, shard in param.shards:
        at, n = spec.coord(rank, axis), spec.degree(axis)
        shape[shard.dim] = _cut(shape[shard.dim], shard, n, at)
    return tuple(shape)


def _cut(size: int, shard: Shard, n: int, at: int) -> int:
    return sum(chunk_sizes(piece, n // shard.copies)[at // shard.copies] for piece in (shard.parts or (size,)))


class Walk:
    """One forward and backward over the timeline."""

    def __init__(self, core: Core, step: Step, rank: int) -> None:
        self.core, self.step, self.rank = core, step, rank
        self.events = core.program.events
        self.unit_paths = {u.path for u in step.units}
        self.ends = self._spans()
        # Backward through a unit's first call completes its gradients: later calls, met before it, add to the same ones.
        self.earliest: dict[str, int] = {}
        for enter, leave in sorted(self.ends.items()):
            if self.events[leave].grad:
                self.earliest.setdefault(self.events[enter].module, enter)
        self.points: list[Point] = []
        self.out: list[Collective | int] = []  # an int stands for what FSDP sends at that point

    def _spans(self) -> dict[int, int]:
        """Index of each module's "leave" by the index of its "enter"."""
        spans, stack = {}, []
        for i, e in enumerate(self.events):
            if e.what == "enter":
                stack.append(i)
            elif e.what == "leave":
                spans[stack.pop()] = i
        return spans

    def run(self) -> list[Collective]:
        """All collectives of the step, in order."""
        self._forward(0, len(self.events), "forward", recompute=False)
        self._backward(0, len(self.events))
        if self.step.policy is not None:
            self._point("end_backward", "", False, True)
        self.out += list(self._gradients())
        return self._resolved()

    def _resolved(self) -> list[Collective]:
        if self.step.policy is None:
            return [c for c in self.out if isinstance(c, Collective)]
        sent = fsdp_events(self.step.units, self.step.policy, self.points)
        done: list[Collective] = []
        back = False
        for item in self.out:
            if isinstance(item, Collective):
                done.append(item)
                continue
            point = self.points[item]
            back = back or point.hook in ("pre_backward", "post_backward", "end_backward") or point.recompute
            for call in sent[item].calls:
                axis = self._data_axis(call.axis)
                name = str(call.dtype).removeprefix("torch.")
                shown = f"{len(call.params)} parameters"
                done.append(Collective(
                    "backward" if back else "forward", call.op, axis, call.ranks_per_group, name, call.elements, call.unit, shown,
                    "fsdp", "",
                ))  # fmt: skip
        return done

    def _data_axis(self, axis: str) -> str:
        if axis == "dp_shard" and self.core.spec.degree("cp") > 1:
            return "+".join(a for a in ("dp_shard", "cp") if self.core.spec.degree(a) > 1)
        return axis

    def _point(self, hook: str, unit: str, recompute: bool, grads: bool) -> None:
        self.out.append(len(self.points))
        self.points.append(Point(hook, unit, recompute, grads))  # type: ignore[arg-type]

    def _forward(self, start: int, end: int, phase: str, recompute: bool) -> None:
        for e in self.events[start:end]:
            if e.what in ("enter", "leave") and e.module in self.unit_paths:
                self._point("pre_forward" if e.what == "enter" else "post_forward", e.module, recompute, True)
            for sent in e.forward:
                self.out.append(_collective(phase, sent, e))

    def _backward(self, start: int, end: int) -> None:
        i = end - 1
        starts = {leave: enter for enter, leave in self.ends.items()}
        while i >= start:
            e = self.events[i]
            if e.what == "leave" and e.module in self.step.recompute:
                self._recomputed(starts[i], i)
                i = starts[i] - 1
                continue
            self._passed(e, i)
            i -= 1

    def _passed(self, e: Event, i: int) -> None:
        if e.what == "leave" and e.module in self.unit_paths and e.grad:
            self._point("pre_backward", e.module, False, True)
        elif e.what == "enter" and e.module in self.unit_paths and e.grad:
            self._point("post_backward", e.module, False, i == self.earliest[e.module])
        for sent in e.backward:
            self.out.append(_collective("backward", sent, e))

    def _recomputed(self, enter: int, leave: int) -> None:
        """Backward of a recomputed unit: mates after the last saved tensor that is read, its forward again up to the last
        saved one, the rest. Where nothing that it saved is read, it does not run again."""
        saved = [j for j in range(enter, leave) if self.events[j].what == "saved"]
        read = max((j for j in saved if self.events[j].grad), default=enter)
        self._passed(self.events[leave], leave)
        self._backward(read + 1, leave)
        if read > enter:
            # The unit's own hooks stand outside the recompute; hooks of units inside it run again.
            self._forward(enter + 1, saved[-1] + 1, "backward", recompute=True)
            self._backward(enter + 1, read + 1)
        self._passed(self.events[enter], enter)

    def _gradients(self) -> Iterator[Collective]:
        """Reductions after backward: see runtime/gradients.py, which packs the same buckets."""
        from meshplan.runtime.gradients import bucket_sizes

        core = self.core
        for how, plans in by_reduction(core).items():
            sizes = [(self._gradient_elements(p), p.dtype) for p in plans]
            apart = reached_apart(core, plans)
            if apart:
                sizes.append((len(apart), plans[-1].dtype))
            data = [how.data] if core.spec.degree(*how.data) > 1 else []
            buckets = bucket_sizes(sizes)
            for number, (tensors, elements, dtype) in enumerate(buckets):
                count = tensors - (bool(apart) and number == len(buckets) - 1)
                for axes in [*((a,) for a in how.sums), *data]:
                    label = group_label(core.spec, busy_axes(core.spec, axes))
                    yield Collective(
                        "backward", "all_reduce", label, core.spec.degree(*axes), dtype, elements, "", f"{count} gradients",
                        "gradients", "",
                    )  # fmt: skip

    def _gradient_elements(self, p: ParamPlan) -> int:
        shape = list(local_param_shape(p, self.core.spec, self.rank))
        if self.step.policy is not None:
            axes = expert_axes(self.core) if p.routed else ("dp_shard", "cp")
            dim, at = fsdp_cuts(self.core)[p.name], self.core.spec.coord(self.rank, *axes)
            if dim is not None:
                shape[dim] = chunk_sizes(shape[dim], self.core.spec.degree(*axes))[at]
        total = 1
        for s in shape:
            total *= s
        return total


def _collective(phase: str, sent: Sent, e: Event) -> Collective:
    side = e.site.side if e.site else "operator"
    key = e.site.key if e.site else e.move
    return Collective(
        phase,
        sent.op,
        sent.axis,
        sent.ranks,
        sent.dtype,
        sent.elements,
        e.module,
        key,
        side,
        str(e.where or ""),
        sent.routed,
    )


def collectives(model: nn.Module, core: Core, rank: int = 0) -> list[Collective]:
    """The collectives of one training step of `core`, as `rank` makes them. `model` is the single-device module."""
    units, policy = fsdp_of(model, core, rank)
    step = Step(units, policy, frozenset(core.bound.recompute_units))
    return Walk(core, step, rank).run()


def totals(sent: Sequence[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """(count, bytes) by (axis, op)."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for c in sent:
        n, b = out.get((c.axis, c.op), (0, 0))
        out[c.axis, c.op] = (n + 1, b + c.bytes)
    return out
