"""Functions of each sample: batch and channels split, by value; statistics of the batch and empty ranks are refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.rules.held import accepted, f, kinds_of, wrong

STATISTICS = [torch.empty(6, dtype=torch.float64, device="meta") for _ in range(2)]
CALLS: list[tuple[Any, ...]] = [
    (F.group_norm, f(4, 6, 5), 2, f(6), f(6)),
    (F.group_norm, f(5, 6, 5), 2),
    (F.batch_norm, f(4, 6), *STATISTICS, f(6), f(6)),
    (F.instance_norm, f(4, 6, 5)),
    (F.avg_pool1d, f(4, 6, 8), 2),
    (torch.max_pool2d, f(4, 6, 8, 8), 2),
    (F.adaptive_avg_pool2d, f(4, 6, 8, 8), 1),
    (F.interpolate, f(4, 6, 8), 16),
    (F.unfold, f(4, 4, 6, 6), 2),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c[0].__name__)
def test_every_accepted_layout_holds(call: tuple[Any, ...], n: int) -> None:
    assert wrong(accepted(*call, n=n)) == []


def test_the_batch_of_each_can_be_split() -> None:
    for call in CALLS:
        assert any(k[0] == "S(0)" for k in kinds_of(*call, n=2)), call[0].__name__


def test_batch_norm_in_training_is_refused() -> None:
    assert not any(k[0] == "S(0)" for k in kinds_of(F.batch_norm, f(4, 6), *STATISTICS, f(6), f(6), True))


def test_a_cut_that_leaves_a_rank_empty_is_refused() -> None:
    # Four samples on three ranks are 2 + 2 + 0.
    assert not any(k[0] == "S(0)" for k in kinds_of(torch.max_pool2d, f(4, 6, 8, 8), 2, n=3))
