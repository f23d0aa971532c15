"""The placement of a fused dim: which rows a rank holds, and that it survives pickling."""

import pickle

import pytest
import torch

from meshplan.runtime.fused import FusedShard, fused_shard


def rows(dim_size, parts, ranks):
    shards, _ = fused_shard(0, parts)._split_tensor(torch.arange(dim_size), ranks, with_padding=False)
    return [shard.tolist() for shard in shards]


def test_each_rank_holds_its_rows_of_every_part():
    assert rows(16, (8, 4, 4), 2) == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]


def test_equal_parts_are_cut_as_torch_cuts_them():
    placement = fused_shard(0, (4, 4))
    assert not isinstance(placement, FusedShard) and placement.split_factor == 2
    assert rows(8, (4, 4), 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_parts_the_ranks_do_not_divide_leave_the_last_rank_less():
    assert rows(8, (5, 3), 2) == [[0, 1, 2, 5, 6], [3, 4, 7]]
    _, padding = fused_shard(0, (5, 3))._split_tensor(torch.arange(8), 2)
    assert padding == [0, 2]


def test_other_dims_than_the_first():
    shards, _ = fused_shard(1, (2, 4))._split_tensor(torch.arange(12).view(2, 6), 2)
    assert shards[1].tolist() == [[1, 4, 5], [7, 10, 11]]


@pytest.mark.parametrize("parts", [(8, 4, 4), (4, 4)])
def test_a_placement_is_pickled_with_its_parts(parts):
    placement = fused_shard(0, parts)
    again = pickle.loads(pickle.dumps(placement))
    assert again == placement and getattr(again, "parts", None) == getattr(placement, "parts", None)
