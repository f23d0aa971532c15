"""One use with numbers: true ones hold, each kind of lie is told apart."""

import pytest
import torch
import torch.nn.functional as F

from meshplan.compiler.check_values import refute
from meshplan.compiler.kinds import A, I, Kind, P, R
from meshplan.plan.placements import Shard
from tests.compiler.rules.held import f, ids
from tests.compiler.test_check_shrink import use

S0, S1 = Shard(0), Shard(1)


def test_a_true_use_holds_forward_and_backward() -> None:
    assert refute(use(F.linear, f(3, 4), f(6, 4), ins=[R, S0], outs=[S1], n=2)) is None
    assert refute(use(F.linear, f(3, 4), f(6, 4), ins=[S1, S1], outs=[P], n=2)) is None


@pytest.mark.parametrize("claimed", [R, P, A, S0, I])
def test_a_wrong_claim_about_the_result_is_refuted(claimed: Kind) -> None:
    assert refute(use(F.linear, f(4, 4), f(4, 4), ins=[R, S0], outs=[claimed], n=2)) is not None


def test_a_result_without_the_claimed_dim_is_refuted() -> None:
    found = refute(use(torch.sum, f(4, 6), ins=[S0], outs=[S0], n=2))
    assert found is not None and "no dim" in found.what


def test_a_gradient_can_be_wrong_where_the_value_is_right() -> None:
    # Rows on each rank times one replicated row: its gradient is a summand on each, and not equal on all.
    assert refute(use(torch.mul, f(4, 6), f(6), ins=[S0, R], outs=[S0], n=2)) is None
    found = refute(use(torch.mul, f(4, 6), f(6), ins=[S0, I], outs=[S0], n=2))
    assert found is not None and "gradient of tensor argument 1" in found.what


def test_a_call_that_fails_on_a_rank_is_refuted() -> None:
    found = refute(use(torch.select, f(4, 6), 0, 3, ins=[S0], outs=[R], n=2))
    assert found is not None and "a rank fails" in found.what


def test_unequal_valid_tokens_refute_a_mean_that_counts_its_own() -> None:
    own = use(F.cross_entropy, f(6, 7), ids(6), ins=[S0, S0], outs=[A], n=2)
    whole = use(F.cross_entropy, f(6, 7), ids(6), ins=[S0, S0], outs=[A], n=2, operator="cross_entropy")
    assert refute(own) is not None
    assert refute(whole) is None


def test_a_call_that_is_nan_on_normal_numbers_is_checked_on_positive_ones() -> None:
    assert refute(use(torch.log, f(4, 6), ins=[S0], outs=[S0], n=2)) is None
    assert refute(use(torch.log, f(4, 6), ins=[P], outs=[P], n=2)) is not None


def test_indices_into_a_dim_of_one_are_all_its_only_one() -> None:
    assert refute(use(torch.gather, f(6, 1), 1, ids(6, 3), ins=[S0, S0], outs=[S0], n=2)) is None


def test_the_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    refute(use(F.dropout, f(4, 6), 0.5, True, ins=[S0], outs=[S0], n=2, operator="dropout"))
    assert torch.equal(before, torch.random.get_rng_state())
