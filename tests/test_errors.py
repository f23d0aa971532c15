"""The one exception: how it reads, and that it crosses processes whole."""

from __future__ import annotations

import pickle

from meshplan.errors import PlanError, Where


def test_place_pointer_module_and_cure_are_shown():
    error = PlanError(
        "no module matches 'layer.*'", code="no-such-module",
        where=Where("plan.yaml", 5, 9, "  - {at: layer.*}"), module="layers.0", legal=["layers.*", "norm"],
    )  # fmt: skip
    assert str(error).splitlines() == [
        "plan.yaml:5:9: no module matches 'layer.*' [no-such-module]",
        "      - {at: layer.*}",
        "            ^",
        "  module: layers.0",
        "  legal:  layers.*, norm",
    ]


def test_the_model_itself_has_a_name_and_a_bare_error_is_one_line():
    assert str(PlanError("x", module="")).splitlines()[-1] == "  module: (the model itself)"
    assert str(PlanError("only this", code="c")) == "only this [c]"


def test_it_pickles_with_all_it_knows():
    error = PlanError("m", code="c", where=Where("f.py", 3), module="a.b", legal="this")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.where, copy.module, copy.legal) == (
        str(error),
        "c",
        Where("f.py", 3),
        "a.b",
        "this",
    )
