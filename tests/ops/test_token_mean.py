"""The token mean: unequal counts, accumulation, empty ranks, and the number that is shown."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.token_mean import collectives, global_mean, token_mean
from meshplan.runtime.comm import AxisGroup
from tests.ops.simulated import run_ranks

# Rank 0: one valid token with loss 4. Rank 1: three with loss 1. Losses under the mask are poison.
LOSSES = torch.tensor([[4.0, float("nan"), float("inf")], [1.0, 1.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, False], [True, True, True]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_ranks_back_propagate_2_and_1_5_whose_mean_is_the_global_one(dtype):
    def rank(groups):
        dp = groups["dp"]
        losses = LOSSES[dp.rank].clone().requires_grad_()
        value = token_mean(losses, MASK[dp.rank].to(dtype), groups=[dp])
        value.backward()
        sent = list(dp.log)
        return value.item(), losses.grad.tolist(), global_mean(value, groups=[dp]).item(), sent

    (value0, grad0, shown0, sent), (value1, grad1, shown1, _) = run_ranks({"dp": 2}, rank)
    assert (value0, value1) == (2.0, 1.5)
    assert shown0 == shown1 == 1.75
    assert grad0 == [0.5, 0.0, 0.0]  # 2 ranks / 4 tokens, halved again by averaging over ranks: 1/4 each
    assert grad1 == [0.5, 0.5, 0.5]
    assert sent == [Call("all_reduce", "dp", 1)] == collectives(groups=[AxisGroup("dp", 2, 0)])


def test_a_rank_without_valid_tokens_gives_zero_and_none_anywhere_gives_nan():
    def rank(groups):
        dp = groups["dp"]
        mask = MASK[1] if dp.rank else torch.zeros(3, dtype=torch.bool)
        some = token_mean(LOSSES[dp.rank], mask, groups=[dp])
        none = token_mean(LOSSES[dp.rank], torch.zeros(3, dtype=torch.bool), groups=[dp])
        return some.item(), none.isnan().item()

    assert run_ranks({"dp": 2}, rank) == [(0.0, True), (2.0, True)]


def test_accumulation_with_the_global_count_sends_nothing_and_sums_to_the_global_mean():
    # Two microbatches a rank: 1 + 2 tokens on rank 0 and 3 + 1 on rank 1, seven in all.
    losses = [[[4.0], [2.0, 6.0]], [[1.0, 1.0, 1.0], [7.0]]]

    def rank(groups):
        dp = groups["dp"]
        parts = [token_mean(torch.tensor(x, dtype=torch.float64), None, 7, groups=[dp]) for x in losses[dp.rank]]
        assert dp.log == collectives(groups=[dp], n_tokens_given=True) == []
        return sum(parts)

    torch.testing.assert_close(sum(run_ranks({"dp": 2}, rank)) / 2, torch.tensor(22 / 7, dtype=torch.float64))


def test_counts_add_up_over_several_axes():
    def rank(groups):
        dp, cp = groups["dp"], groups["cp"]
        n = 1 + dp.rank + 3 * cp.rank  # 1, 4, 2, 5 tokens on the four ranks, each with loss n
        return token_mean(torch.full((n,), float(n), dtype=torch.float64), groups=[dp, cp])

    values = run_ranks({"dp": 2, "cp": 2}, rank)
    torch.testing.assert_close(sum(values) / 4, torch.tensor((1 + 16 + 4 + 25) / 12, dtype=torch.float64))


def test_a_floating_mask_is_a_weight():
    value = token_mean(torch.tensor([1.0, 5.0]), torch.tensor([0.75, 0.25]), groups=[])
    assert value.item() == 2.0


def test_tokens_are_counted_in_integers_whatever_the_dtype_of_the_losses():
    told = []
    group = AxisGroup("dp", 2, 0, on_call=lambda op, g, x: told.append(x))
    token_mean(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool), groups=[group])
    assert [(x.dtype, x.item()) for x in told] == [(torch.int64, 3)]


def test_a_mask_that_would_broadcast_is_refused():
    with pytest.raises(PlanError) as refusal:
        token_mean(torch.ones(2, 3), torch.ones(3, dtype=torch.bool), groups=[])
    assert refusal.value.code == "mask-shape"
