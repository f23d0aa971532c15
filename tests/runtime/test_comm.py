"""Shards are cut as torch.chunk cuts; abstract groups give the shapes that real ones do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshplan.runtime.comm import AxisGroup, chunk_offset, chunk_size, chunk_sizes


@given(st.integers(0, 60), st.integers(1, 9))
def test_chunks_are_those_of_torch(size, n):
    pieces = [len(c) for c in torch.arange(size).chunk(n)] if size else []
    pieces += [0] * (n - len(pieces))
    assert chunk_sizes(size, n) == pieces
    assert [chunk_size(size, n, i) for i in range(n)] == pieces
    assert [chunk_offset(size, n, i) for i in range(n)] == [min(size, sum(pieces[:i])) for i in range(n)]


@pytest.mark.parametrize("rank", range(4))
def test_abstract_results_have_this_ranks_shapes(rank):
    group = AxisGroup("tp", 4, rank)
    own = chunk_size(7, 4, rank)
    assert group.all_gather(torch.zeros(own, 3), 0, 7).shape == (7, 3)
    assert group.reduce_scatter(torch.zeros(5, 7), 1).shape == (5, own)
    assert group.all_reduce(torch.zeros(2, 2)).shape == (2, 2)
    assert group.shard(torch.arange(7), 0).tolist() == list(range(7))[rank * 2 : rank * 2 + own]


def test_one_rank_sends_nothing():
    group = AxisGroup("tp", 1, 0, None, lambda *a: pytest.fail("a group of one rank communicated"))
    x = torch.arange(6.0).view(2, 3)
    assert group.all_gather(x, 1) is x and group.reduce_scatter(x, 0) is x and group.all_reduce(x) is x
