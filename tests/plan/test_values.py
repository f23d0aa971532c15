"""Checked conversions of plain values."""

import pytest
import torch

from meshplan.errors import PlanError, Where
from meshplan.plan.source import Source
from meshplan.plan.values import DTYPES, as_dtype, as_int, as_paths, dtype_name, nearest_word, placed

HERE = Source(Where("plan.yaml", 3, 7))


def test_dtypes_go_by_torchs_bare_names_both_ways():
    for name, dtype in DTYPES.items():
        assert as_dtype("d", name, HERE) is as_dtype("d", f"torch.{name}", HERE) is dtype is getattr(torch, name)
        assert dtype_name(dtype) == name
    assert as_dtype("d", None, HERE) is None


@pytest.mark.parametrize("name", ["bf16", "float", "Tensor", 16])
def test_an_unknown_dtype_is_refused_with_the_legal_names(name):
    with pytest.raises(PlanError) as error:
        as_dtype("d", name, HERE)
    assert (error.value.code, error.value.where.line) == ("unknown-option", 3)
    assert "bfloat16" in error.value.legal


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_a_degree_is_a_positive_integer(value):
    with pytest.raises(PlanError):
        as_int("n", value, HERE)


def test_one_path_stands_for_a_list_of_one():
    assert as_paths("units", "layers.*", HERE) == as_paths("units", ["layers.*"], HERE) == ("layers.*",)
    with pytest.raises(PlanError):
        as_paths("units", ["a", 1], HERE)


def test_a_nearby_word_is_suggested_and_a_far_one_is_not():
    assert nearest_word("no-shard", ["no_shard", "full"]) == "; did you mean 'no_shard'?"
    assert nearest_word("xyz", ["no_shard", "full"]) == ""


def test_an_error_without_a_place_is_given_one_and_keeps_one_it_has():
    for own in (None, Where("a.py", 1)):
        with pytest.raises(PlanError) as error, placed(HERE):
            raise PlanError("m", code="c", where=own, module="x", legal="l")
        assert error.value.where == (own or HERE.where)
        assert (error.value.code, error.value.module, error.value.legal) == ("c", "x", "l")
