"""Calls that combine elements: every layout they are run in holds by value; what is wrong on shards is not accepted."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.rules.held import accepted, f, ids, kinds_of, mask, wrong

T = torch.Tensor
CALLS: list[tuple[Any, ...]] = [
    (torch.sum, f(3, 4)),
    (torch.sum, f(3, 4), -1),
    (T.sum, f(3, 4, 5), (0, -1)),
    (T.sum, f(3, 4), -1, True),
    (torch.mean, f(3, 4)),
    (T.mean, f(3, 4), -1, True),
    (T.mean, f(6, 4), 0),
    (T.mean, f(6, 4, 6), (0, -1)),
    (torch.amax, f(3, 4), -1),
    (torch.amax, f(3, 4), 0, True),
    (torch.max, f(3, 4), -1),
    (torch.max, f(3, 4), f(4)),
    (torch.argmax, f(3, 4), -1),
    (torch.var, f(3, 4), -1),
    (torch.std, f(4, 3), 0),
    (torch.var_mean, f(3, 4), -1),
    (T.var, f(6, 3), -1, False, True),
    (T.norm, f(3, 4), 2, -1),
    (torch.linalg.vector_norm, f(3, 4), 2, -1, True),
    (F.normalize, f(3, 4)),
    (F.cosine_similarity, f(3, 4), f(3, 4)),
    (torch.logsumexp, f(3, 4), -1),
    (torch.prod, f(3, 4), 1),
    (torch.any, mask(3, 4), -1),
    (torch.cumsum, f(3, 4), -1),
    (torch.cumsum, f(3, 4), 0),
    (torch.cumprod, f(3, 4), -1),
    (torch.logcumsumexp, f(3, 4), -1),
    (torch.cummax, f(3, 4), -1),
    (torch.sort, f(3, 4)),
    (torch.topk, f(3, 4), 2),
    (torch.topk, f(4, 3), 2, 0),
    (F.softmax, f(3, 4), -1),
    (F.softmax, f(3, 4), 0),
    (F.log_softmax, f(3, 4), -1),
    (F.glu, f(4, 6)),
    (torch.gather, f(3, 4), 1, ids(3, 2)),
    (torch.gather, f(3, 4), 0, ids(2, 4)),
    (torch.index_select, f(3, 4), -1, ids(2)),
    (torch.index_select, f(4, 3), 0, ids(5)),
    (T.scatter, f(3, 4), 1, ids(3, 4), f(3, 4)),
    (T.scatter_add, f(3, 4), 0, ids(3, 4), f(3, 4)),
    (T.index_add, f(4, 3), 0, ids(5), f(5, 3)),
    (T.__getitem__, f(5, 4), ids(3)),
    (T.__getitem__, f(5, 4, 3), (ids(3), ids(3))),
    (T.__getitem__, f(5, 4, 3), (slice(None), ids(3))),
    (T.__getitem__, f(5, 4, 3), (ids(3), slice(None), ids(3))),
    (T.__setitem__, f(4, 6), mask(4, 6), 0.5),
    (T.__setitem__, f(4, 6), mask(4), 0.5),
    (T.masked_fill, f(4, 6, 3), mask(4, 1, 1), 0.5),
    (T.index_put, f(4, 6), (mask(4, 6),), f()),
    (torch.bucketize, f(3, 4), f(5)),
    (torch.addmm, f(5), f(3, 4), f(4, 5)),
    (torch.baddbmm, f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c[0].__name__)
def test_every_accepted_layout_holds(call: tuple[Any, ...], n: int) -> None:
    uses = list(accepted(*call, n=n))
    assert uses
    assert wrong(iter(uses)) == []


@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(2, 6), min_size=2, max_size=3),
    dim=st.integers(-2, 1),
    keepdim=st.booleans(),
    func=st.sampled_from([T.sum, T.mean, T.amax]),
)
def test_reductions_hold_for_any_shape_and_dim(shape: list[int], dim: int, keepdim: bool, func: Any) -> None:
    assert wrong(accepted(func, f(*shape), dim, keepdim, n=2)) == []


@pytest.mark.parametrize("func", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_scans_are_not_done_along_a_split_dim_given_as_a_negative_number(func: Any) -> None:
    assert ("S(1)", "->", "S(1)") not in kinds_of(func, f(3, 4), -1)
    assert ("S(0)", "->", "S(0)") in kinds_of(func, f(3, 4), -1)


def test_a_mean_over_a_split_dim_is_a_mean_of_means_only_where_shards_are_equal() -> None:
    assert ("S(0)", "->", "A") in kinds_of(T.mean, f(6, 4), 0)
    assert not any(k[0] == "S(0)" for k in kinds_of(T.mean, f(5, 4), 0))


def test_a_norm_takes_no_partial_sum_and_no_split_dim_of_its_own() -> None:
    found = kinds_of(torch.linalg.vector_norm, f(3, 4), 2, -1)
    assert found == {("S(0)", "->", "S(0)")}


def test_statistics_of_a_split_dim_are_refused() -> None:
    for func in (torch.var, torch.std):
        assert kinds_of(func, f(4, 3), 0) == {("S(1)", "->", "S(0)")}
