"""Layouts as written: which axes, which forms, and where `parts` belong."""

import pytest

from meshplan.errors import PlanError
from meshplan.plan.layouts import INPUT_AXES, as_layout, as_layouts, as_param_layout, layouts_dict
from meshplan.plan.placements import P, R, S
from meshplan.plan.source import Source

HERE = Source()


def code(call, *args):
    with pytest.raises(PlanError) as error:
        call(*args)
    return error.value.code


def test_strings_and_placements_are_the_same_layout():
    assert as_param_layout("w", {"tp": "S(0)"}, HERE) == as_param_layout("w", {"tp": S(0)}, HERE) == {"tp": S(0)}


def test_parts_beside_the_axis_belong_to_the_axis_that_shards():
    assert as_param_layout("w", {"tp": S(0), "parts": [8, 4, 4]}, HERE) == {"tp": S(0, [8, 4, 4])}
    assert as_param_layout("w", {"dp_shard": R, "parts": [3, 3], "tp": S(-1)}, HERE)["tp"] == S(-1, [3, 3])


@pytest.mark.parametrize(
    "layout",
    [{"tp": R, "parts": [8]}, {"parts": [8]}, {"tp": S(0, [4, 4]), "parts": [4, 4]}],
)
def test_parts_without_exactly_one_bare_shard_are_refused(layout):
    assert code(as_param_layout, "w", layout, HERE) == "bad-parts"


def test_parts_of_two_sharded_axes_are_ambiguous():
    assert code(as_layout, "x", {"cp": S(1), "tp": S(2), "parts": [2, 2]}, HERE, INPUT_AXES) == "bad-parts"


@pytest.mark.parametrize("parts", [[], 8, [0], [2.5], "8", [True]])
def test_parts_are_a_list_of_positive_sizes(parts):
    assert code(as_param_layout, "w", {"tp": S(0), "parts": parts}, HERE) == "bad-value"


def test_a_parameter_is_never_partial_and_never_sharded_by_a_rule_on_a_data_axis():
    assert code(as_param_layout, "w", {"tp": P}, HERE) == "partial-parameter"
    assert code(as_param_layout, "w", {"dp_shard": S(0)}, HERE) == "unknown-axis"
    assert as_param_layout("w", {"dp_shard": R}, HERE) == {"dp_shard": R}


@pytest.mark.parametrize(
    ("axis", "hint"), [("tpp", "did you mean 'tp'"), ("dp", "`place` only"), ("ep", "experts"), ("pp", "pipeline")]
)
def test_an_axis_that_cannot_be_placed_on_says_where_it_belongs(axis, hint):
    with pytest.raises(PlanError) as error:
        as_param_layout("w", {axis: S(0)}, HERE)
    assert error.value.code == "unknown-axis"
    assert hint in str(error.value)


def test_dp_is_legal_for_inputs_of_the_model():
    assert as_layout("x", {"dp": S(0)}, HERE, INPUT_AXES) == {"dp": S(0)}


def test_a_bare_layout_is_kept_under_the_empty_key_and_written_back_bare():
    assert as_layouts("output", {"tp": "S(1)"}, HERE) == {"": {"tp": S(1)}}
    assert layouts_dict({"": {"tp": S(1)}}) == {"tp": "S(1)"}


def test_named_layouts_keep_names_and_indices_become_strings():
    named = as_layouts("output", {0: {"tp": R}, "loss.ce": {"cp": P}}, HERE)
    assert named == {"0": {"tp": R}, "loss.ce": {"cp": P}}
    assert as_layouts("output", layouts_dict(named), HERE) == named


def test_an_argument_may_have_the_name_of_an_axis():
    assert as_layouts("input", {"tp": {"tp": S(0)}}, HERE) == {"tp": {"tp": S(0)}}


@pytest.mark.parametrize(
    "value", [{"tp": R, "x": {"tp": R}}, {"": {"tp": R}, "x": {"tp": R}}, {-1: {"tp": R}}, [R], "R"]
)
def test_mixed_and_misshapen_layouts_are_refused(value):
    assert code(as_layouts, "input", value, HERE) == "bad-value"


def test_nothing_said_is_nothing_kept():
    assert as_layouts("input", None, HERE) == as_layouts("input", {}, HERE) == {}
    assert code(as_layout, "x", {"tp": None}, HERE, INPUT_AXES) == "bad-placement"
