"""Placements and their notation."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import PlanError
from meshplan.plan.placements import P, Partial, R, Replicate, S, Shard, parse_placement


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("R", Replicate()),
        ("P", Partial()),
        ("S(0)", Shard(0)),
        (" S( -1 ) ", Shard(-1)),
        ("S(1, parts=[8, 4, 4])", Shard(1, (8, 4, 4))),
        ("S(1,parts=[8])", Shard(1, (8,))),
    ],
)
def test_the_notation_reads_as_the_placement(text, placement):
    assert parse_placement(text) == placement


@given(st.integers(-4, 4), st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=4))
def test_a_shard_prints_as_the_notation_it_is_read_from(dim, parts):
    assert parse_placement(str(S(dim, parts))) == S(dim, parts)


@pytest.mark.parametrize("text", ["", "S", "S()", "S(a)", "S(0", "s(0)", "S(0, parts=[])", "S(0) R", "S(0, parts=[0])"])
def test_anything_else_is_refused(text):
    with pytest.raises(PlanError) as error:
        parse_placement(text)
    assert error.value.code == "bad-placement"


@pytest.mark.parametrize(("dim", "parts"), [("0", None), (True, None), (0.0, None), (0, ()), (0, (2, -1)), (0, (1.5,))])
def test_a_shard_of_wrong_numbers_cannot_be_built(dim, parts):
    with pytest.raises(PlanError) as error:
        S(dim, parts)
    assert error.value.code == "bad-placement"


def test_equal_placements_are_one_key_and_survive_pickling():
    assert {S(0, [2, 4]): "a"}[Shard(0, (2, 4))] == "a"
    assert pickle.loads(pickle.dumps((S(0, [2, 4]), R, P))) == (S(0, [2, 4]), R, P)
    assert S(0) != S(0, [4])
