"""Laying values out and putting them together: worked out by hand for one small tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.compiler.kinds import A, I, N, P, R
from meshplan.compiler.pieces import apart, cut, gather, gather_gradient, local_size, spread, spread_gradient
from meshplan.plan.placements import Shard

X = torch.arange(15, dtype=torch.float64).view(5, 3)


def test_shards_are_cut_as_torch_chunks_them() -> None:
    assert [cut(X, Shard(0), 3, r)[:, 0].tolist() for r in range(3)] == [[0.0, 3.0], [6.0, 9.0], [12.0]]


def test_each_part_of_a_fused_dim_is_cut_on_its_own() -> None:
    row = torch.tensor([[1, 2, 3, 4, 10, 20]])
    kind = Shard(1, (4, 2))
    assert cut(row, kind, 2, 0).tolist() == [[1, 2, 10]]
    assert cut(row, kind, 2, 1).tolist() == [[3, 4, 20]]
    assert local_size((1, 6), kind, 2, 1) == (1, 3)
    assert gather([cut(row, kind, 2, r) for r in range(2)], kind, (1, 6)).tolist() == row.tolist()  # type: ignore[union-attr]


def test_a_partial_mean_is_summands_of_as_many_times_the_value() -> None:
    parts = spread(X, A, 4, torch.Generator().manual_seed(1))
    assert torch.allclose(sum(parts[1:], parts[0]), 4 * X)
    assert not torch.allclose(parts[0], X)


def test_gradients_are_owned_as_the_kind_says() -> None:
    g = X / 7
    generator = torch.Generator().manual_seed(1)
    assert torch.allclose(sum(spread_gradient(g, R, 2, generator)), g)
    assert all(torch.equal(p, g) for kind in (I, P) for p in spread_gradient(g, kind, 2, generator))
    assert all(torch.allclose(p, g / 2) for p in spread_gradient(g, A, 2, generator))
    assert torch.equal(spread_gradient(g, Shard(1), 3, generator)[2], g[:, 2:])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([R, I, N, P, A, Shard(0), Shard(1)]), st.integers(1, 4), st.integers(0, 9))
def test_what_is_laid_out_comes_together_again(kind: object, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = gather(spread(X, kind, n, generator), kind, X.shape)  # type: ignore[arg-type]
    gradient = gather_gradient(spread_gradient(X, kind, n, generator), kind, X.shape)  # type: ignore[arg-type]
    assert value is not None and torch.allclose(value, X)
    assert gradient is not None and torch.allclose(gradient, X)


def test_copies_that_differ_are_no_value() -> None:
    assert gather([X, X + 1e-6], R, X.shape) is None


@pytest.mark.parametrize(("a", "b"), [(float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), float("inf"))])
def test_special_values_must_be_in_the_same_places(a: float, b: float) -> None:
    assert apart(torch.tensor([a, 1.0]), torch.tensor([b, 1.0])) == float("inf")
    assert apart(torch.tensor([a, 1.0]), torch.tensor([a, 1.0])) == 0.0


def test_distance_is_relative_to_the_largest_value_or_the_floor() -> None:
    assert apart(torch.tensor([11.0, 10.0]), torch.tensor([10.0, 10.0])) == pytest.approx(0.1)
    assert apart(torch.tensor([0.001]), torch.tensor([0.0])) == pytest.approx(0.001)
    assert apart(torch.tensor([0.002]), torch.tensor([0.001]), floor=1e-6) == pytest.approx(1.0)
