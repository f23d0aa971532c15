"""Ids of a split vocabulary: each is inside exactly one shard, at the row where its global row went."""

import pytest
import torch

from meshplan.ops.ids import locate, require_in_range
from meshplan.runtime.comm import AxisGroup, chunk_sizes


@pytest.mark.parametrize(("size", "n"), [(7, 2), (7, 4), (5, 4), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_every_id_is_found_on_one_rank_at_its_row(size, n, dtype):
    ids = torch.arange(size).flip(0).to(dtype)
    found = torch.zeros(size, dtype=torch.int64)
    for rank, rows in enumerate(torch.arange(size).split(chunk_sizes(size, n))):
        row, inside = locate(ids, AxisGroup("tp", n, rank), size)
        assert torch.equal(rows[row[inside]], ids[inside].long())
        assert row.min() >= 0
        assert row.max() <= max(len(rows) - 1, 0)  # what lies elsewhere can still be looked up
        found += inside
    assert found.tolist() == [1] * size


def test_ids_out_of_range_are_inside_no_shard():
    for rank in range(2):
        assert not locate(torch.tensor([-100, -1, 7]), AxisGroup("tp", 2, rank), 7)[1].any()


def test_the_first_id_out_of_range_is_named():
    require_in_range(torch.tensor([0, 6, -100]), 7, "{}", ignore_index=-100)
    with pytest.raises(IndexError, match="id 9 is bad"):
        require_in_range(torch.tensor([0, 9, -1]), 7, "id {} is bad")


def test_shapes_alone_and_no_ids_have_nothing_to_check():
    require_in_range(torch.empty(3, dtype=torch.int64, device="meta"), 7, "{}")
    require_in_range(torch.empty(0, dtype=torch.int64), 7, "{}")
