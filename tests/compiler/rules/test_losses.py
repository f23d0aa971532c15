"""Losses on shards: means only where shards are equal, sums as partial sums; all by value."""

from typing import Any

import pytest
import torch.nn.functional as F

from tests.compiler.rules.held import accepted, f, ids, kinds_of, wrong

PAIRS = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("loss", PAIRS, ids=lambda c: c.__name__)
def test_every_accepted_layout_holds(loss: Any, reduction: str) -> None:
    for n in (2, 3):
        assert wrong(accepted(loss, f(6, 4), f(6, 4), n=n, reduction=reduction)) == []


@pytest.mark.parametrize("loss", PAIRS, ids=lambda c: c.__name__)
def test_a_mean_over_unequal_shards_is_refused(loss: Any) -> None:
    found = kinds_of(loss, f(5, 4), f(5, 4), n=2)
    assert ("S(0)", "S(0)", "->", "A") not in found
    assert ("S(1)", "S(1)", "->", "A") in found


def test_a_batchmean_divides_by_the_length_of_the_first_dim_only() -> None:
    found = kinds_of(F.kl_div, f(6, 4), f(6, 4), reduction="batchmean")
    assert found == {("S(0)", "S(0)", "->", "A"), ("S(1)", "S(1)", "->", "P")}
    assert wrong(accepted(F.kl_div, f(6, 4), f(6, 4), reduction="batchmean", n=2)) == []


def test_nll_means_are_refused_for_their_count_is_one_ranks_own() -> None:
    assert kinds_of(F.nll_loss, f(6, 5), ids(6)) == set()


@pytest.mark.parametrize(("reduction", "out"), [("sum", "P"), ("none", "S(0)")])
def test_nll_sums_hold(reduction: str, out: str) -> None:
    assert kinds_of(F.nll_loss, f(6, 5), ids(6), reduction=reduction) == {("S(0)", "S(0)", "->", out)}
    assert wrong(accepted(F.nll_loss, f(6, 5, 3), ids(6, 3), reduction=reduction, n=2)) == []
