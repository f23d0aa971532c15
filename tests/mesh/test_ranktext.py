"""Ranks as text: runs, steps and bounds."""

import pytest

from meshplan.mesh.ranktext import rank_runs, ranks_short, ranks_text


def test_runs_are_of_sorted_consecutive_ranks():
    assert rank_runs([9, 0, 2, 1, 8, 5]) == [(0, 2), (5, 5), (8, 9)]
    assert rank_runs([]) == []


def test_messages_write_runs_and_are_bounded():
    assert ranks_text([3, 0, 1, 2, 7]) == "0-3, 7"
    assert ranks_text(range(16384)) == "0-16383"
    assert ranks_text(range(0, 40, 2), limit=3) == "0, 2, 4 and 17 more"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([4], "4"),
        ([4, 5], "4,5"),
        (range(8), "0-7"),
        ([0, 4, 8, 12], "0,4,8,12"),
        (range(0, 128, 8), "0,8,..,120"),
        ([0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], "0-3,8-11,16-19"),
        ([r for r in range(48) if r % 8 < 2], "0-1,8-9,..,40-41"),
    ],
)
def test_table_cells_hold_no_space(ranks, text):
    assert ranks_short(ranks) == text
