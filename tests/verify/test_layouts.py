"""Layouts read off values: one value on 2 x 2 ranks, laid out by hand."""

import pytest
import torch

from meshplan.compiler.kinds import A, I, N, P, R
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.verify.layouts import distance, infer, show, take, take_gradient, whole

SPEC = MeshSpec((("dp_shard", 2), ("tp", 2)))
AXES = ("dp_shard", "tp")
X = torch.arange(12, dtype=torch.float64).view(4, 3) - 5.0


def test_a_dim_split_by_two_axes_is_split_outermost_first() -> None:
    held = [take(X, (Shard(0), Shard(0)), AXES, SPEC, rank)[0, 0].item() for rank in range(4)]
    assert held == [-5.0, -2.0, 1.0, 4.0]


def test_layouts_are_inferred_from_values() -> None:
    for kinds in [(N, N), (Shard(0), N), (N, Shard(1)), (Shard(0), Shard(0)), (Shard(1), Shard(0))]:
        assert infer([take(X, kinds, AXES, SPEC, r) for r in range(4)], AXES, SPEC, X) == kinds


def test_summands_and_means_are_told_from_copies() -> None:
    thirds = [X * (0.25 if r % 2 else 0.75) for r in range(4)]
    assert infer(thirds, AXES, SPEC, X) == (N, P)
    assert infer([x * 2 for x in thirds], AXES, SPEC, X) == (N, A)


def test_what_no_layout_explains_has_none() -> None:
    assert infer([X, X, X, X + 1], AXES, SPEC, X) is None
    assert infer([X[:1]] * 4, AXES, SPEC, X) is None


def test_gradients_are_put_together_by_ownership() -> None:
    for kinds in [(Shard(0), R), (A, I), (R, Shard(1)), (P, N)]:
        parts = [take_gradient(X, kinds, AXES, SPEC, r) for r in range(4)]
        assert torch.allclose(whole(parts, kinds, AXES, SPEC, X, gradient=True), X)  # type: ignore[arg-type]


def test_copies_that_differ_are_infinitely_far() -> None:
    assert distance([X, X, X, X + 1], (N, N), AXES, SPEC, X, floor=1e-6) == float("inf")
    assert distance([X + 1e-3] * 4, (N, N), AXES, SPEC, X, floor=1e-6) == pytest.approx(1e-3 / 6)


def test_a_layout_reads_as_in_a_plan() -> None:
    assert show((Shard(0), N), AXES) == "{dp_shard: S(0), tp: R}"
