"""Hook points of FSDP2 for a model whose forward is known as nested calls of its units: forward, backward, recompute.

A trace knows its own points; this is for everyone who only knows which unit calls which, and in what order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshplan.compiler.fsdp_schedule import Point


@dataclass(frozen=True)
class UnitRun:
    """One call of a unit in the forward, with the calls of units inside it.

    Attributes:
        unit: the unit's path, or None for a stretch of code that is no unit (to put a checkpoint around).
        inner: the calls of units inside, in order.
        input_grad: some input needs a gradient, so the backward tells when all of them are done.
        output_grad: some output needs a gradient.
        returns_inner: the output is the very tensor the last inner run returned, as in `nn.Sequential`: then the inner
            unit's backward hook, registered first, fires before this one's.
        recompute: a non-reentrant checkpoint encloses the call, hooks included: they run again in the backward. A
            checkpoint inside a unit that encloses no other unit needs no mention, it repeats no hook.
    """

    unit: str | None
    inner: tuple[UnitRun, ...] = ()
    input_grad: bool = True
    output_grad: bool = True
    returns_inner: bool = False
    recompute: bool = False


def forward_points(run: UnitRun, recompute: bool = False) -> tuple[Point, ...]:
    """The points of one forward of `run`, in order: pre-forward, the inner runs, post-forward."""
    inner = tuple(point for r in run.inner for point in forward_points(r, recompute))
    if run.unit is None:
        return inner
    return (Point("pre_forward", run.unit, recompute), *inner, Point("post_forward", run.unit, recompute))


def backward_points(*runs: UnitRun) -> tuple[Point, ...]:
    """The points of one backward through the forwards `runs` of the root, which ran in that order.

    Autograd runs what was recorded last first, so runs come back in reverse. A checkpointed run is run again when the
    backward first needs something saved inside it: right after the gradient of its output arrives.
    """
    left = Counter(unit for run in runs for unit in _units(run))
    points: list[Point] = []
    for run in reversed(runs):
        _backward(run, left, points)
    root = runs[0].unit
    return (*points, Point("end_backward", root if root is not None else ""))


def step_points(run: UnitRun, microbatches: int = 1) -> tuple[Point, ...]:
    """The points of `microbatches` forward/backward pairs of `run`."""
    return (forward_points(run) + backward_points(run)) * microbatches


def eval_points(run: UnitRun) -> tuple[Point, ...]:
    """The points of one forward without gradients."""
    return (*forward_points(run), Point("end_eval", run.unit if run.unit is not None else ""))


def _units(run: UnitRun) -> Iterator[str]:
    if run.unit is not None and run.output_grad:
        yield run.unit
    for inner in run.inner:
        yield from _units(inner)


def _backward(run: UnitRun, left: Counter[str], points: list[Point], announced: bool = False) -> None:
    if not announced:
        points.extend(Point("pre_backward", unit) for unit in _at_output(run))
    if run.recompute and run.output_grad:
        points.extend(forward_points(run, recompute=True))
    for i, inner in reversed(list(enumerate(run.inner))):
        _backward(inner, left, points, announced=run.returns_inner and i == len(run.inner) - 1)
    if run.unit is not None and run.output_grad:
        left[run.unit] -= 1
        if run.input_grad:
            points.append(Point("post_backward", run.unit, grads=left[run.unit] == 0))


def _at_output(run: UnitRun) -> tuple[str, ...]:
    """Units whose hook sits on the output tensor of `run`, in the order they fire."""
    first = _at_output(run.inner[-1]) if run.returns_inner and run.inner else ()
    own = (run.unit,) if run.unit is not None and run.output_grad else ()
    return (*first, *own)
