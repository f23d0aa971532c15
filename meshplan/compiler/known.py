"""What one propagation knows: every tensor's kinds, the modules that are running, where the trace stands, what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.beside import Beside
from meshplan.compiler.capture import Call, ModuleStack, Trace
from meshplan.compiler.edits import Edit
from meshplan.compiler.few_heads import sub_axes
from meshplan.compiler.frames import Frames
from meshplan.compiler.invocations import Invocations
from meshplan.compiler.kinds import Kind, N, Pending, replicated, user_letter
from meshplan.compiler.layout import Axis, Info
from meshplan.compiler.ownership import Owed
from meshplan.compiler.repeats import Segment
from meshplan.compiler.sites import Decisions, Move, Site
from meshplan.compiler.source import raised_at
from meshplan.compiler.strategies import Chooser
from meshplan.compiler.timeline import Timeline
from meshplan.compiler.uses import Decided
from meshplan.errors import PlanError, Where
from meshplan.plan.placements import Placement


@dataclass
class Pass:
    """What one propagation produced.

    `calls` are (caller, callee) module paths, `repeats` (module, the equal one whose propagation stands for it), in order;
    `reads` are (module, parameter that its own code uses); `kept` is the refusal of what the forward left on a module;
    `reached` are parameters that a backward from the outputs gives a gradient;
    `decided` has one item a call, for the checks; `spared` are calls that a rank leaves out;
    `merged` are (call, result) whose gradients are right in sum alone; `beside` may compute while experts' tokens travel.
    """

    moves: list[tuple[Site, Move, Where | None]] = field(default_factory=list)
    edits: dict[str, dict[int, Edit]] = field(default_factory=dict)
    invocations: Invocations = field(default_factory=Invocations)
    param_use: dict[tuple[str, str, str], Pending] = field(default_factory=dict)
    used_at: dict[tuple[str, str, str], Where | None] = field(default_factory=dict)
    reads: dict[tuple[str, str], Where | None] = field(default_factory=dict)
    kept: PlanError | None = None
    outputs: list[tuple[str, list[Kind], tuple[int, ...], bool]] = field(default_factory=list)
    layouts: list[tuple[str, str, str, tuple[int, ...], list[Kind]]] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    shared: set[Site] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    calls: set[tuple[str, str]] = field(default_factory=set)
    repeats: list[tuple[str, str]] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)
    spared: list[int] = field(default_factory=list)
    merged: frozenset[tuple[int, int]] = frozenset()
    beside: list[Beside] = field(default_factory=list)


class Known:
    """The state of one propagation, and the errors that name where it stands.

    Arguments:
        trace: the single-device program.
        axes: the axes of more than one rank.
        declared: (module path, side, key) -> what the plan says of that boundary.
        owners: modules that hold a parameter that an axis other than a data axis shards.
        holders: by parameter, the modules that hold it.
        decisions: of earlier passes.
        chooser: finds how a call runs on shards.
    """

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
        self.trace, self.axes, self.declared, self.owners = trace, axes, declared, owners
        self.holders = holders
        self.decisions, self.chooser = decisions, chooser
        spec = chooser.groups.spec
        heads = {axis.name: sub_axes(axis.name)[0] for axis in axes}
        self.split = {name: spec.degree(sub) for name, sub in heads.items() if sub in spec.names}
        self.index = {axis.name: k for k, axis in enumerate(axes)}
        self.result = Pass()
        self.stack, self.frames = ModuleStack(), Frames()
        self.infos: dict[int, Info] = {}
        self.valued: dict[int, Info] = {}  # the latest by value
        self.unseen: dict[int, tuple[list[Kind], Owed]] = {}
        self.moved_inputs: dict[tuple[int, str], list[Site]] = {}
        self.keep: list[Any] = []
        self.sharing: dict[int, list[Tensor]] = {}
        self.cursor = self.entered = self.read = 0
        self.paused = False
        self.grouped_calls = 0
        self.segments: dict[int, Segment] = {}
        self.fill: Callable[[str, nn.Module, int], None] = lambda path, module, value: None
        self.units: frozenset[str] = frozenset()  # of FSDP
        self.casts = False  # whether they cast what they are handed
        self.memo: dict[tuple[int, str, str, str, bool], tuple[Tensor, Site, Any, list[Move]]] = {}
        self.gathers: list[tuple[Site, str, Pending, Where | None]] = []
        self.late: list[
            tuple[Site, str]
        ] = []  # moves made after the boundary that is to make them from the next pass on

    def label(self, t: Tensor, info: Info) -> Tensor:
        self.infos[id(t)] = self.valued[info.value] = info
        self.keep.append(t)
        self.sharing.setdefault(compat.storage_key(t), []).append(t)
        return t

    def written(self, t: Tensor, kinds: list[Kind]) -> None:
        """`t` was written in place and is of `kinds` now. What shares its memory may have become differentiable by it, and
        then its gradient is whose that of `t` is; what was redistributed before has the old values."""
        views = self.sharing.get(compat.storage_key(t), [])
        for view in views:
            known = self.infos[id(view)].kinds
            if view.requires_grad:
                for k, new in enumerate(kinds):
                    if known[k] == N and replicated(new):
                        known[k] = new
        old = {id(view) for view in views}
        self.memo = {key: made for key, made in self.memo.items() if key[0] not in old}
        self.frames.forget(old)

    def relabel(self, new: Tensor, old: Tensor) -> None:
        """`new` is the value that `old` is, in another dtype."""
        known = self.info(old)
        self.label(new, Info(known.value, list(known.kinds), known.data, known.param))

    def info(self, t: Tensor) -> Info:
        found = self.infos.get(id(t))
        if t.requires_grad and id(t) in self.unseen:
            self.uncover(t)
        if found is None:  # a constant the model holds outside its buffers
            self.label(t, Info(-1, [N] * len(self.axes), False))
            return self.infos[id(t)]
        return found

    def uncover(self, t: Tensor) -> None:
        """`t` was made with gradients off and has one now; see `Calls`."""
        raise NotImplementedError

    def show(self, t: Tensor) -> str:
        """`f32[4, 2048, 512] {dp_shard: S(0), tp: S(2)}` with the global shape."""
        info = self.info(t)
        shape = self.trace.values[info.value].shape if info.value >= 0 else t.shape
        short = str(t.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        kinds = ", ".join(f"{a.name}: {user_letter(k)}" for a, k in zip(self.axes, info.kinds, strict=True))
        return f"{short}{list(shape)} {{{kinds}}}"

    def note(self, path: str, side: str, key: str, x: Tensor) -> None:
        info = self.info(x)
        if info.value >= 0:
            self.result.layouts.append((path, side, key, tuple(self.trace.values[info.value].shape), list(info.kinds)))

    def diverged(self, what: str) -> PlanError:
        rec = self.trace.calls[self.cursor] if self.cursor < len(self.trace.calls) else None
        where = rec.where if rec else None
        expected = f"; the single device calls {rec.name}" if rec else ""
        return PlanError(
            f"on this rank the program of {self.stack.path or 'the model'} differs from the single device's: {what}{expected}",
            code="diverged", where=where, module=self.stack.path,
            legal="Python control flow that does not depend on sizes a plan splits",
        )  # fmt: skip

    def failed(self, error: Exception) -> PlanError:
        """The model's code went through on the single device and raises `error` here, most often because it looks at a size."""
        said = str(error).strip().splitlines()
        return PlanError(
            f"on this rank {self.stack.path or 'the model'} fails: {type(error).__name__}: {said[0] if said else ''}",
            code="diverged", where=raised_at(error), module=self.stack.path,
            legal="an input of R declared for that module, or code that does not look at sizes a plan splits",
        )  # fmt: skip

    def refuse(self, rec: Call, tensors: list[Tensor], axis: Axis) -> PlanError:
        shown = ", ".join(self.show(t) for t in tensors)
        return PlanError(
            f"{rec.name}({shown}) cannot run on shards over {axis.name} (degree {axis.degree}), and what it is given cannot be "
            "gathered for it",
            code="no-rule", where=rec.where, module=rec.module,
            legal="R, or another dim, for what is sharded there",
        )  # fmt: skip

    def _refuse_in_checkpoint(self, what: str, module: str, where: Where | None) -> None:
        if compat.in_checkpoint():
            at = min(self.cursor, len(self.trace.calls) - 1)  # a boundary has no line of its own: the next call's
            where = where or self.trace.calls[at].where
            raise PlanError(
                f"{what} inside a checkpoint of the model's own, which would repeat it in backward unforeseen",
                code="own-checkpoint", where=where, module=module,
                legal="the plan's `recompute` section, and the model's own checkpointing turned off",
            )  # fmt: skip
