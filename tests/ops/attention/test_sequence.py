"""How a sequence lies on ranks: every position once, zigzag pairs early with late, cut and joined again."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.ops.attention.sequence import Sequence, in_order, out_of_order


def test_zigzag_pairs_an_early_chunk_with_a_late_one():
    sequence = Sequence(16, 2, "zigzag")
    assert [sequence.runs(r) for r in range(2)] == [((0, 4), (12, 16)), ((4, 12),)]
    assert sequence.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert Sequence(16, 2).runs(1) == ((8, 16),)
    assert Sequence(7, 1, "zigzag").runs(0) == ((0, 7),)


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_shards_join_to_the_whole(n, balance):
    sequence, x = Sequence(48, n, balance), torch.randn(2, 48, 3)
    parts = [sequence.cut(x, 1, rank) for rank in range(n)]
    assert all(p.shape[1] == sequence.local for p in parts)
    assert torch.equal(sequence.join(parts, 1), x)
    for rank, part in enumerate(parts):
        assert torch.equal(x[:, sequence.positions(rank)], part)


def test_causal_work_is_equal_under_zigzag():
    sequence = Sequence(48, 4, "zigzag")
    assert len({int(sequence.positions(r).sum()) for r in range(4)}) == 1


def test_neighbours_together_hold_a_coarser_cut_in_order():
    fine, coarse, x = Sequence(48, 4, "zigzag"), Sequence(48, 2, "zigzag"), torch.arange(48)
    for block in range(2):
        runs = fine.all_runs(2 * block, 2)
        both = torch.cat([fine.cut(x, 0, 2 * block + i) for i in range(2)])
        ordered = in_order(both, 0, runs)
        assert torch.equal(ordered, coarse.cut(x, 0, block))
        assert torch.equal(out_of_order(ordered, 0, runs), both)


def test_a_length_that_ranks_do_not_divide_is_refused():
    with pytest.raises(PlanError) as refusal:
        Sequence(1002, 4, "zigzag")
    assert refusal.value.code == "context-length"
    assert refusal.value.legal == "a multiple of 8, such as 1000 or 1008"
    with pytest.raises(PlanError) as refusal:
        Sequence(3, 4)
    assert refusal.value.legal == "a multiple of 4, such as 4"
    with pytest.raises(PlanError, match="balanced 'stripe'"):
        Sequence(8, 2, "stripe")


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_gives_every_rank_the_same_causal_work(ranks):
    size = 2 * ranks * 64
    for balance in ("zigzag", "contiguous"):
        order = Sequence(size, ranks, balance)
        counted = [int((order.positions(r) + 1).sum()) for r in range(ranks)]
        assert [order.causal_pairs(r) for r in range(ranks)] == counted
        assert sum(counted) == size * (size + 1) // 2
        spread = max(counted) / (sum(counted) / ranks)
        if balance == "zigzag":
            assert len(set(counted)) == 1
        else:  # 1 : 3 : 5 ..., but for the half of the diagonal
            assert spread == pytest.approx((2 * ranks - 1) / ranks, rel=0.02)
