"""Counts known in closed form come back from their values; what is no sum of products is refused."""

from math import ceil

import pytest
from sympy import Integer

from meshplan.compiler.fitting import Unfit, evaluate, fit, symbols

AT = symbols(["b", "s", "tp", "dp"])
b, s, tp, dp = (AT[name] for name in ("b", "s", "tp", "dp"))
BASE = {"b": 24, "s": 12, "tp": 2, "dp": 3}
LINES = {"b": [48, 72], "s": [24, 36], "tp": [4, 6], "dp": [6, 9]}
POWERS = {"b": 1, "s": 1, "tp": -1, "dp": -1}


def test_a_product_of_powers_with_a_rational_coefficient():
    found = fit(BASE, LINES, POWERS, lambda p: p["b"] * p["s"] ** 2 * 5 // (p["tp"] * p["dp"]))
    assert found == Integer(5) * b * s**2 / (tp * dp)


def test_what_does_not_depend_on_a_variable_does_not_name_it():
    assert fit(BASE, LINES, POWERS, lambda p: 7) == 7


def test_a_split_and_a_replicated_part_add_up():
    assert fit(BASE, LINES, POWERS, lambda p: 720 // p["tp"] + 65) == 720 / tp + 65


def test_sums_in_two_variables_are_told_apart_at_the_corners():
    def count(p):
        return (720 // p["tp"] + 90) // p["dp"] * p["b"] + 11 * p["b"]

    assert fit(BASE, LINES, POWERS, count) == (720 * b / (tp * dp) + 90 * b / dp + 11 * b)


def test_padding_is_no_sum_of_products():
    with pytest.raises(Unfit, match="in dp it is 9 at 3, 12 at 6, 9 at 9"):
        fit(BASE, LINES, POWERS, lambda p: p["dp"] * ceil(7 / p["dp"]))


def test_a_sum_needs_a_third_value_to_be_checked():
    with pytest.raises(Unfit, match="in tp"):
        fit(BASE, {"tp": [4]}, POWERS, lambda p: 720 // p["tp"] + 65)


def test_numbers_take_the_place_of_symbols():
    assert evaluate(3 * b * s / tp, {"b": 8, "s": 5, "tp": 4}) == 30
