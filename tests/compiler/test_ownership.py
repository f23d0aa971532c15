"""Who reduces the gradient of a replicated value."""

from __future__ import annotations

from meshplan.compiler.kinds import I, N, Pending, R
from meshplan.compiler.ownership import combine, to_invariant


def test_data_makes_an_open_parameter_invariant():
    weight = Pending("w", data=False)
    assert combine([N, weight], [False, True], [True, False]) == I
    assert weight.needs == {I}


def test_parameters_alone_stay_open_and_share_their_fate():
    a, b = Pending("a", data=False), Pending("b", data=False)
    out = combine([a, b, N], [True, True, False], [False, False, False])
    assert isinstance(out, Pending)
    out.need(R)
    assert a.find().needs == b.find().needs == {R} and a.find().sites == {"a", "b"}


def test_a_partial_gradient_spreads_to_what_it_is_computed_with():
    weight = Pending("w", data=False)
    assert combine([R, weight], [True, True], [True, False]) == R
    assert weight.needs == {R}


def test_values_without_gradient_are_neutral():
    assert combine([N, I], [False, False], [True, True]) == N


def test_r_beside_i_is_made_invariant_first():
    assert to_invariant([R, I, R], [True, True, False]) == [0]
    assert to_invariant([R, R], [True, True]) == []
