"""Rules and inputs: what may be written, and its normal form."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.plan.placements import P, R, S
from meshplan.plan.rules import Input, Rule


def code(call, *args, **kwargs):
    with pytest.raises(PlanError) as error:
        call(*args, **kwargs)
    return error.value.code


def test_a_rule_is_kept_in_one_form_however_it_is_written():
    written = Rule("a.*", params={"weight": {"tp": "S(0)", "parts": [2, 4]}}, output={"tp": R}, input={0: {"tp": "R"}})
    assert written == Rule("a.*", {"weight": {"tp": S(0, [2, 4])}}, {"0": {"tp": R}}, {"": {"tp": R}})


def test_a_rules_mapping_leaves_defaults_out_and_reads_back():
    rule = Rule("x", use="rowwise", output={"tp": S(1)}, override=True)
    assert rule.to_dict() == {"at": "x", "use": "rowwise", "output": {"tp": "S(1)"}, "override": True}
    assert Rule.from_dict(rule.to_dict()) == rule
    assert Rule.from_dict(rule) is rule


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"at": "x"}, "empty-rule"),
        ({"use": "colwise"}, "missing-key"),
        ({"at": "x", "parms": {}}, "unknown-key"),
        ({"at": "x", "use": "column"}, "unknown-option"),
        ({"at": "x..y", "use": "colwise"}, "bad-pattern"),
        ({"at": 3, "use": "colwise"}, "bad-value"),
        ({"at": "x", "use": "colwise", "override": "yes"}, "bad-value"),
        ({"at": "x", "params": ["weight"]}, "bad-value"),
        ({"at": "x", "params": {"weight": "S(0)"}}, "bad-value"),
        ({"at": "x", "params": {"weight": {"tp": "P"}}}, "partial-parameter"),
        ("x", "bad-value"),
    ],
)
def test_what_a_rule_cannot_say_is_refused(value, expected):
    assert code(Rule.from_dict, value) == expected


def test_an_input_is_kept_in_one_form_however_it_is_written():
    written = Input([8, 2048], "int64", {"dp": "S(0)"})
    assert written == Input(shape=(8, 2048), dtype=torch.int64, place={"dp": S(0)})
    assert written.to_dict() == {"dtype": "int64", "shape": [8, 2048], "place": {"dp": "S(0)"}}
    assert Input.from_dict(written.to_dict()) == written
    assert Input.from_dict({}) == Input()
    assert Input(shape=()).to_dict() == {"shape": []}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"shape": [8, -1]}, "bad-value"),
        ({"shape": 8}, "bad-value"),
        ({"dtype": "int"}, "unknown-option"),
        ({"place": {"dp": P}}, "partial-input"),
        ({"place": {"dp": S(0), "dp_shard": S(0)}}, "two-layouts"),
        ({"place": {"pp": S(0)}}, "unknown-axis"),
        ({"placed": {}}, "unknown-key"),
    ],
)
def test_what_an_input_cannot_say_is_refused(value, expected):
    assert code(Input.from_dict, value) == expected
