"""Places: the user's line for plans in Python, marks for plans in files."""

import inspect
import sys

import pytest

from meshplan.errors import PlanError, Where
from meshplan.plan.plan import Plan, Rule
from meshplan.plan.sections import Fsdp
from meshplan.plan.source import Mark, Source, user_source


def _line() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_a_rule_knows_the_line_and_column_of_the_code_that_built_it():
    rule, line = Rule("layers.*", use="colwise"), _line()
    assert (rule.where.file, rule.where.line) == (__file__, line)
    assert rule.where.text.strip().startswith("rule, line = Rule(")
    if sys.version_info >= (3, 11):
        assert rule.where.text[rule.where.column - 1 :].startswith('Rule("layers.*"')


def test_rules_built_by_a_helper_of_the_user_are_placed_in_the_helper():
    def helper():
        return Rule("x", use="rowwise"), _line()

    rule, line = helper()
    assert rule.where.line == line


def test_a_call_that_spans_lines_is_placed_where_it_begins():
    first = _line() + 1
    rule = Rule(
        "x",
        use="rowwise",
    )
    assert rule.where.line == first


def test_sections_and_plans_in_python_are_placed_too():
    section, line = Fsdp(["layers.*"]), _line()
    assert section.where.line == line
    with pytest.raises(PlanError) as error:
        Plan({"tp": 2}, rules=[{"at": "x", "use": "colwize"}])
    assert error.value.where.file == __file__
    assert f"{__file__}:{error.value.where.line}:" in str(error.value)


def test_the_place_is_the_innermost_line_outside_meshplan():
    source, line = user_source(), _line()
    assert source.where.line == line


def test_the_place_does_not_take_part_in_equality():
    assert Rule("x", use="colwise") == Rule("x", use="colwise", source=Source(Where("elsewhere", 1)))


def test_a_cursor_answers_with_the_nearest_place_above_it():
    outer = Mark(Where("f", 1, 1), Where("f", 1, 8))
    inner = Mark(Where("f", 2, 3), Where("f", 2, 9))
    source = Source(Where("f"), {("a",): outer, ("a", "b"): inner})
    assert source.child("a", "b").where == Where("f", 2, 9)
    assert source.child("a").child("b").key_where == Where("f", 2, 3)
    assert source.child("a", "c", 0).where == Where("f", 1, 8)
    assert source.child("z").where == Where("f")
