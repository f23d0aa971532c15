"""Over how many ranks heads can be exchanged."""

import pytest

from meshplan.errors import PlanError
from meshplan.ops.attention.legal import check_heads, exchange_degrees


def test_degrees_divide_the_query_heads_and_meet_the_key_heads():
    assert exchange_degrees(8, 8) == [1, 2, 4, 8]
    assert exchange_degrees(8, 2) == [1, 2, 4, 8]  # two key heads, each on two or four ranks
    assert exchange_degrees(12, 6) == [
        1,
        2,
        3,
        6,
        12,
    ]  # not 4: a rank's three query heads would need two halves of key heads
    assert exchange_degrees(7, 1) == [1, 7]


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_methods_that_keep_heads_take_any(method):
    check_heads(7, 1, 64, method)


def test_the_refusal_lists_what_is_legal():
    with pytest.raises(PlanError) as refusal:
        check_heads(4, 2, 8, "ulysses")
    assert refusal.value.code == "context-heads"
    assert (
        refusal.value.message
        == "context method ulysses exchanges heads among 8, and tp leaves 4 query heads and 2 key heads a rank"
    )
    assert refusal.value.legal == "cp: 1 or 2 or 4; method ring or allgather takes any heads"
    with pytest.raises(PlanError) as refusal:
        check_heads(12, 12, 8, "hybrid", 3)
    assert refusal.value.legal.startswith("inner: 1 or 2 or 4;")
    check_heads(12, 12, 8, "hybrid", 4)
