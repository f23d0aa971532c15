"""Covering combinations hold every value on both sides, and none twice."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering


@pytest.mark.parametrize("many, few, times", list(itertools.product((3, 8, 11), (2, 3, 4), (1, 2))))
def test_every_value_is_there_as_often_as_the_others(many, few, times, monkeypatch):
    monkeypatch.delenv("MESHPLAN_TESTS", raising=False)
    pairs = covering(range(many), range(few), times)
    assert len(pairs) == many * times
    assert {a for a, _ in pairs} == set(range(many))
    if many >= few:
        assert {b for _, b in pairs} == set(range(few))
    monkeypatch.setenv("MESHPLAN_TESTS", "whole")
    assert set(pairs) <= set(covering(range(many), range(few), times)) == set(itertools.product(range(many), range(few)))
