"""Hook points from nested unit calls: in which order they come, and what FSDP2 sends at each."""

from __future__ import annotations

from typing import Any

import torch

from meshplan.compiler.fsdp_points import UnitRun, backward_points, eval_points, forward_points, step_points
from meshplan.compiler.fsdp_schedule import FsdpParam, FsdpPolicy, FsdpUnit, Point, fsdp_events

F32 = torch.float32


def _root(*inner: UnitRun) -> UnitRun:
    return UnitRun("", inner, input_grad=False)


def _sent(points: tuple[Point, ...], units: tuple[FsdpUnit, ...], policy: FsdpPolicy) -> list[str]:
    short = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "A"}
    return [
        " ".join([f"{e.point.hook}({e.point.unit})", *(f"{short[c.op]}:{c.unit}" for c in e.calls)])
        for e in fsdp_events(units, policy, points)
        if e.calls
    ]


def _unit(path: str, **kwargs: Any) -> FsdpUnit:
    return FsdpUnit(path, (FsdpParam(f"{path}.w", (4, 3), F32),), is_root=path == "", **kwargs)


def test_each_call_is_said_with_the_hook_that_makes_it():
    units = (_unit("", reshard_after_forward=False), _unit("a"), _unit("b"))
    run = _root(UnitRun("a"), UnitRun("b"))
    assert _sent(step_points(run), units, FsdpPolicy(shard=2, replicate=3)) == [
        "pre_forward() G:",
        "pre_forward(a) G:a",
        "pre_forward(b) G:b",
        # The root is still gathered; its backward prefetches b, which was the last to run and is gathered again.
        "pre_backward() G:b",
        # b prefetches a before b is reduced.
        "pre_backward(b) G:a",
        "post_backward(b) S:b A:b",
        "post_backward(a) S:a A:a",
        "end_backward() S: A:",
    ]


def test_what_needs_no_gradient_at_its_input_is_reduced_at_the_end_the_root_first():
    units = (_unit("", reshard_after_forward=False), _unit("a"), _unit("b"))
    run = _root(UnitRun("a", input_grad=False), UnitRun("b", input_grad=False))
    assert _sent(backward_points(run), units, FsdpPolicy(shard=2))[-1] == "end_backward() S: S:a S:b"


def test_a_replica_sum_that_nothing_joins_at_the_last_microbatch_is_flushed():
    units = (_unit("", reshard_after_forward=False), _unit("a"))
    both, without = _root(UnitRun("a")), UnitRun("", input_grad=False)
    policy = FsdpPolicy(shard=2, replicate=2, microbatches=2)
    points = step_points(both) + step_points(without)
    assert _sent(points, units, policy)[-1] == "end_backward() S: A: S:a A:a"


def _short(points: tuple[Point, ...]) -> list[str]:
    return [f"{p.hook} {p.unit}{' recompute' if p.recompute else ''}{'' if p.grads else ' incomplete'}" for p in points]


def test_a_checkpointed_run_repeats_its_hooks_once_its_output_gradient_is_there():
    run = UnitRun("a", (UnitRun("a.b"),), recompute=True)
    assert _short(backward_points(_root(run))) == [
        "pre_backward ",
        "pre_backward a",
        "pre_forward a recompute",
        "pre_forward a.b recompute",
        "post_forward a.b recompute",
        "post_forward a recompute",
        "pre_backward a.b",
        "post_backward a.b",
        "post_backward a",
        "end_backward ",
    ]


def test_gradients_of_a_unit_called_twice_are_complete_after_its_first_call_is_differentiated():
    run = _root(UnitRun("a"), UnitRun("b"), UnitRun("a"))
    assert [p for p in _short(backward_points(run)) if p.startswith("post")] == [
        "post_backward a incomplete",
        "post_backward b",
        "post_backward a",
    ]
    two = _short(backward_points(_root(UnitRun("a")), _root(UnitRun("a"))))
    assert two.count("post_backward a incomplete") == two.count("post_backward a") == 1


def test_hooks_on_one_output_tensor_fire_from_the_inside_out():
    inner = UnitRun("a", (UnitRun("a.b"),), returns_inner=True)
    run = UnitRun("", (inner,), input_grad=False, returns_inner=True)
    assert _short(backward_points(run))[:4] == [
        "pre_backward a.b",
        "pre_backward a",
        "pre_backward ",
        "post_backward a.b",
    ]


def test_a_run_without_output_gradient_has_no_backward_and_an_evaluation_none_at_all():
    frozen = UnitRun("a", input_grad=False, output_grad=False)
    assert _short(backward_points(_root(frozen))) == ["pre_backward ", "end_backward "]
    assert _short(forward_points(frozen)) == ["pre_forward a", "post_forward a"]
    assert _short(eval_points(_root(frozen)))[-1] == "end_eval "
