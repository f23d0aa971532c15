"""The collectives FSDP2 will send, one by one and in order, worked out from hook points before anything runs.

FSDP2 (`torch.distributed.fsdp.fully_shard`) communicates from module and autograd hooks, so what it sends depends on
the order in which the hooks fire. This file replays the state each unit keeps (gathered or not, gather in flight, place
in the forward order) over a sequence of hook points. Source of the rules: `_fsdp_param_group.py`, `_fsdp_state.py` and
`_fsdp_collectives.py` of torch 2.11 and 2.13, which agree in all that is used here:

- a unit gathers at its pre-forward unless it is still gathered, and again at its pre-backward; the pre-backward of a
  unit then prefetches the unit that ran its forward just before it, hence before the current unit's reduce-scatter;
- the root is not resharded after its forward, and the last unit is (so it is gathered twice in a row);
- a unit reduces when the gradients of its inputs are complete; units whose inputs need no gradient (the root, a block
  fed by a frozen embedding) reduce in a callback after the whole backward, in module order, the root first;
- a prefetch ignores whether its target needs a backward: a frozen unit may be gathered for nothing;
- dim 0 is padded to a multiple of the ranks; one shard rank sends nothing, yet replicas still average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from meshplan.errors import PlanError

Strategy = Literal["zero1", "zero2", "zero3"]
Hook = Literal["pre_forward", "post_forward", "pre_backward", "post_backward", "end_backward", "end_eval"]


@dataclass(frozen=True)
class FsdpParam:
    """One parameter of a unit, as this rank's data-parallel group sees it.

    Attributes:
        name: its name in the model.
        local_shape: its shape after tensor parallelism, before FSDP.
        dtype: the dtype it is stored in.
        shard_dim: the dim FSDP cuts; a dim other than 0 must divide by the shard ranks.
        requires_grad: whether it is trained.
        used: whether a backward through the unit reaches it (a trainable parameter that is not reached sends nothing).
    """

    name: str
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    shard_dim: int = 0
    requires_grad: bool = True
    used: bool = True


@dataclass(frozen=True)
class FsdpUnit:
    """The parameters gathered together around one module's forward. `reshard_after_forward` is the unit's own setting;
    see `resharded_after_forward` for the default of a strategy. `shard` ranks along `axis` share its parameters: those of the
    policy where that is 0."""

    path: str
    params: tuple[FsdpParam, ...]
    is_root: bool = False
    reshard_after_forward: bool = True
    shard: int = 0
    axis: str = "dp_shard"


@dataclass(frozen=True)
class FsdpPolicy:
    """How a model is sharded over its data ranks.

    Attributes:
        strategy: zero3 (gathered around each use), zero2 (gathered once a step, gradients reduced at every microbatch)
            or zero1 (gathered once a step, gradients reduced at the last microbatch).
        shard: ranks that share one copy of the parameters (`dp_shard`).
        replicate: copies (`dp_replicate`); None is a mesh without that axis, which is not the same as 1: a hybrid
            mesh all-reduces even over one replica.
        param_dtype: dtype of gathered parameters, None for the stored one.
        reduce_dtype: dtype of gradient reductions, None for the gradient's.
        microbatches: forward/backward pairs in one optimizer step.
    """

    strategy: Strategy = "zero3"
    shard: int = 1
    replicate: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    microbatches: int = 1


@dataclass(frozen=True)
class FsdpCall:
    """One collective. `elements` counts the gathered or unreduced tensor, padding included; a gather of mixed dtypes
    travels as bytes (`uint8`). `params` names what is packed, in order."""

    op: Literal["all_gather", "reduce_scatter", "all_reduce"]
    axis: str
    ranks_per_group: int
    elements: int
    dtype: torch.dtype
    unit: str
    params: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A moment at which FSDP2's hooks run.

    Attributes:
        hook: `pre_forward` and `post_forward` (around a unit's call), `pre_backward` (the gradient of the unit's output
            arrives), `post_backward` (the gradients of all its inputs are done; never comes if none needs one),
            `end_backward` (the backward is over) and `end_eval` (a forward without gradients is over).
        unit: path of the unit; the root's "" for the last two hooks.
        recompute: the forward runs again inside the backward (activation checkpointing).
        grads: at `post_backward`, whether the parameters' gradients are complete; False while an earlier call of the
            same unit is still to be differentiated, since autograd adds all uses before it delivers.
    """

    hook: Hook
    unit: str
    recompute: bool = False
    grads: bool = True


@dataclass(frozen=True)
class FsdpEvent:
    """What is sent at one hook point, in order."""

    point: Point
    calls: tuple[FsdpCall, ...]


@dataclass(frozen=True)
class MicrobatchFlags:
    """What happens at the end of one microbatch's backward: reduce over the shard ranks, all-reduce over replicas (only
    if reduced), free the gathered parameters."""

    reduce: bool
    all_reduce: bool
    reshard: bool


def microbatch_flags(strategy: Strategy, index: int, count: int) -> MicrobatchFlags:
    """The flags of microbatch `index` (0-based) of `count`: replicas meet once, at the last; only zero1 keeps whole
    gradients until then; only zero3 frees parameters in between."""
    last = index == count - 1
    return MicrobatchFlags(reduce=last or strategy != "zero1", all_reduce=last, reshard=last or strategy == "zero3")


def resharded_after_forward(strategy: Strategy, is_root: bool, override: bool | None = None) -> bool:
    """Whether a unit is freed after its forward. The root never is: its backward follows at once."""
    if is_root:
        return False
    return strategy == "zero3" if override is None else override


def all_gather_call(unit: FsdpUnit, policy: FsdpPolicy) -> FsdpCall | None:
    """The gather of all parameters of `unit`, frozen ones included; None where one rank has everything."""
    ranks = unit.shard or policy.shard
    if ranks == 1 or not unit.params:
        return None
    dtypes = [_gathered_dtype(p, policy) for p in unit.params]
    sizes = [_padded(p, ranks) for p in unit.params]
    if len(set(dtypes)) == 1:
        elements, dtype = sum(sizes), dtypes[0]
    else:
        elements, dtype = sum(n * d.itemsize for n, d in zip(sizes, dtypes, strict=True)), torch.uint8
    names = tuple(p.name for p in unit.params)
    return FsdpCall("all_gather", unit.axis, ranks, elements, dtype, unit.path, names)


def reduce_calls(unit: FsdpUnit, policy: FsdpPolicy, all_reduce: bool = True) -> tuple[FsdpCall, ...]:
    """The reduction of the trained parameters' gradients of `unit`: reduce-scatter over the shard ranks, then, on a
    hybrid mesh, all-reduce of the shard over the replicas in the same dtype.

    Raises:
        PlanError `fsdp-mixed-dtypes`: FSDP2 packs a unit's gradients into one buffer, so trained parameters of a unit
            must be stored in one dtype.
    """
    trained = [p for p in unit.params if p.requires_grad]
    if len({p.dtype for p in trained}) > 1:
        raise PlanError(
            f"unit {unit.path!r} trains parameters of dtypes {sorted({str(p.dtype) for p in trained})}",
            code="fsdp-mixed-dtypes",
            module=unit.path,
            legal="trained parameters of one dtype in a unit: cast them, freeze some, or make them a unit of their own",
        )
    trained = [p for p in trained if p.used]
    if not trained:
        return ()
    dtype = policy.reduce_dtype or _gathered_dtype(trained[0], policy)
    ranks = unit.shard or policy.shard
    elements = sum(_padded(p, ranks) for p in trained)
    names = tuple(p.name for p in trained)
    calls = []
    if ranks > 1:
        calls.append(FsdpCall("reduce_scatter", unit.axis, ranks, elements, dtype, unit.path, names))
    if policy.replicate is not None and all_reduce:
        shard = elements // ranks
        calls.append(FsdpCall("all_reduce", "dp_replicate", policy.replicate, shard, dtype, unit.path, names))
    return tuple(calls)


def gradient_division(
    dtype: torch.dtype, shard: int, replicate: int | None = None
) -> tuple[float | None, float | None, Literal["avg", "sum"]]:
    """How FSDP2 turns sums into means: (divisor before, divisor after, reduction op) for gradients reduced in `dtype`.

    float32 and bfloat16 use an averaging reduction over each axis. Other dtypes may overflow, so they sum, dividing by
    about the square root of the rank count before and by the rest after (`_get_gradient_divide_factors`).
    """
    ranks = shard * (replicate or 1)
    if dtype in (torch.float32, torch.bfloat16):
        return None, None, "sum" if ranks == 1 else "avg"
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before, "sum"


def fsdp_events(units: Sequence[FsdpUnit], policy: FsdpPolicy, points: Iterable[Point]) -> tuple[FsdpEvent, ...]:
    """Replay `points` and say what each of them sends; one event for each point, in their order.

    Arguments:
        units: all units, in the model's `named_modules()` order (the root first): FSDP2 reduces what is left over at
            the end of a backward in that order.
        policy: the sharding. Microbatches are told apart by `end_backward` points, and start over after the last.
        points: the hook points of any number of passes, as `forward_points` and `backward_points` make them or as a
            trace saw them.
    """
    machine = _Machine(units, policy)
    return tuple(FsdpEvent(point, tuple(machine.at(point))) for point in points)


def _gathered_dtype(param: FsdpParam, policy: FsdpPolicy) -> torch.dtype:
    return policy.param_dtype if policy.param_dtype is not None and param.dtype.is_floating_point else param.dtype


def _padded(param: FsdpParam, ranks: int) -> int:
    size = math.prod(param.local_shape)
    if param.shard_dim != 0 or param.local_shape[0] == 0:
        return size
    rows = param.local_shape[0]
    return -(-rows // ranks) * ranks * (size // rows)


@dataclass
class _Live:
    """A unit's changing state. `module` and `group` are FSDP2's two training states, of the module's hooks and of its
    parameters, which part ways when a forward runs again inside a backward."""

    unit: FsdpUnit
    module: str = "idle"
    group: str = "idle"
    gathered: bool = False
    in_flight: bool = False
    positions: list[int] = field(default_factory=list)
    reached: bool = False  # a gradient came in during this backward and is not reduced yet
    held: bool = False  # gradients of earlier microbatches wait, whole (zero1) or as this replica's sum (hybrid)


class _Machine:
    def __init__(self, units: Sequence[FsdpUnit], policy: FsdpPolicy) -> None:
        self.policy, self.microbatch = policy, 0
        self.live = {u.path: _Live(u) for u in units}
        self.order: list[_Live] = []  # units in the order their forwards ended, with repetitions
        self.mark = 0  # length of `order` when the root's forward began
        self.out: list[FsdpCall] = []

    def at(self, point: Point) -> list[FsdpCall]:
        self.out = []
        unit = self.live[point.unit]
        match point.hook:
            case "pre_forward":
                self._pre_forward(unit)
            case "post_forward":
                self._post_forward(unit, point.recompute)
            case "pre_backward":
                self._pre_backward(unit)
            case "post_backward":
                self._post_backward(unit, point.grads)
            case "end_backward":
                self._end_backward()
            case "end_eval":
                self._end_eval()
        return self.out

    def _gather(self, unit: _Live) -> None:
        if unit.in_flight or unit.gathered or not unit.unit.params:
            return
        unit.in_flight = True
        call = all_gather_call(unit.unit, self.policy)
        if call is not None:
            self.out.append(call)

    def _wait(self, unit: _Live) -> None:
        unit.gathered, unit.in_flight = unit.gathered or unit.in_flight, False

    def _pre_forward(self, unit: _Live) -> None:
        if unit.unit.is_root:
            self.mark = len(self.order)
        if unit.module != "pre_backward":  # else: a forward that runs again for a backward that has begun
            unit.module = unit.group = "forward"
        self._gather(unit)
        self._wait(unit)

    def _post_forward(self, unit: _Live, recompute: bool) -> None:
        if unit.module == "pre_backward":
            return
        unit.module = unit.group = "idle"
        if recompute or not unit.unit.params:
            return
        if unit.unit.reshard_after_forward:
            unit.gathered = False
        unit.positions.append(len(self.order))
        self.order.append(unit)

    def _pre_backward(self, unit: _Live) -> None:
        unit.module = "pre_backward"
        if unit.group == "pre_backward" or not unit.unit.params:
            return
        unit.group, unit.reached = "pre_backward", True
        self._gather(unit)
        self._wait(unit)
        if unit.positions and (position := unit.positions.pop()) > 0:
            self._gather(self.order[position - 1])

    def _post_backward(self, unit: _Live, grads: bool) -> None:
        unit.group = "post_backward"
        flags = microbatch_flags(self.policy.strategy, self.microbatch, self.policy.microbatches)
        # Whole gradients that wait are found at any post-backward; a replica's sum only joins gradients that come now.
        have = (grads and unit.reached) or (unit.held and self.policy.strategy == "zero1")
        if grads:
            unit.reached = False
        if flags.reshard:
            unit.gathered = False
        if not have:
            return
        unit.held = not flags.reduce or (self.policy.replicate is not None and not flags.all_reduce)
        if flags.reduce:
            self.out.extend(reduce_calls(unit.unit, self.policy, flags.all_reduce))

    def _end_backward(self) -> None:
        for unit in self.live.values():
            if unit.unit.params and unit.group != "post_backward":
                self._post_backward(unit, grads=True)
            unit.module = unit.group = "idle"
            unit.in_flight = unit.reached = False
            unit.positions.clear()
        self.order.clear()
        if self.microbatch == self.policy.microbatches - 1:
            for unit in self.live.values():
                if unit.held:  # its last microbatch brought nothing: meshplan flushes the sum, see fsdp_accumulation.py
                    unit.held = False
                    self.out.extend(reduce_calls(unit.unit, self.policy))
        self.microbatch = (self.microbatch + 1) % self.policy.microbatches

    def _end_eval(self) -> None:
        # meshplan's own hook, not FSDP2's: see lowering/fsdp.py on what a forward without gradients leaves behind.
        for unit in self.live.values():
            unit.gathered = False
            unit.positions = [p for p in unit.positions if p < self.mark]
        del self.order[self.mark :]
