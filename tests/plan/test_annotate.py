"""Annotations: invisible on one device, collected into rules."""

import copy
import inspect

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.annotate import annotation, place
from meshplan.plan.placements import R, S
from meshplan.plan.plan import Plan, Rule


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = place(nn.Linear(3, 8), weight={"tp": S(0)}, bias={"tp": S(0)})
        self.down = place(nn.Linear(8, 3, bias=False), weight={"tp": "S(1)"}, output={"tp": R})

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


RULES = (
    Rule("0.up", params={"weight": {"tp": S(0)}, "bias": {"tp": S(0)}}),
    Rule("0.down", params={"weight": {"tp": S(1)}}, output={"tp": R}),
)


def test_annotations_become_one_rule_a_module():
    plan = Plan.from_annotations(nn.Sequential(Mlp()), mesh={"tp": 2}, fsdp={"units": "0"})
    assert plan == Plan({"tp": 2}, rules=RULES, fsdp={"units": ["0"]})


def test_a_rule_carries_the_line_of_its_annotation():
    plan = Plan.from_annotations(nn.Sequential(Mlp()), mesh={"tp": 2})
    lines, first = inspect.getsourcelines(Mlp)
    offset = next(i for i, line in enumerate(lines) if "self.up = place" in line)
    assert (plan.rules[0].where.file, plan.rules[0].where.line) == (__file__, first + offset)


def test_an_annotated_module_runs_saves_and_copies_as_before():
    torch.manual_seed(0)
    model = Mlp()
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    plain.load_state_dict({"0.weight": model.up.weight, "0.bias": model.up.bias, "2.weight": model.down.weight})
    x = torch.randn(5, 3)
    assert torch.equal(model(x), plain(x))
    assert list(model.state_dict()) == ["up.weight", "up.bias", "down.weight"]
    copied = nn.Sequential(copy.deepcopy(model))
    assert Plan.from_annotations(copied, mesh={"tp": 2}).rules == RULES


def test_a_module_shared_under_two_names_is_one_rule():
    model = nn.ModuleDict({"a": place(nn.Linear(2, 4), weight={"tp": S(0)})})
    model["b"] = model["a"]
    assert [rule.at for rule in Plan.from_annotations(model, mesh={"tp": 2}).rules] == ["a"]


def test_the_model_itself_may_be_annotated():
    model = place(Mlp(), input={"x": {"cp": S(1)}})
    assert Plan.from_annotations(model, mesh={"tp": 2}).rules[0] == Rule("", input={"x": {"cp": S(1)}})


def test_two_annotations_of_one_module_add_up_and_may_not_repeat():
    linear = place(place(nn.Linear(2, 4), weight={"tp": S(0)}), output={"tp": R}, weight={"cp": R})
    assert annotation(linear) == Rule("", params={"weight": {"tp": S(0), "cp": R}}, output={"tp": R})
    with pytest.raises(PlanError) as error:
        place(linear, output={"tp": S(1)})
    assert error.value.code == "two-rules"
    assert annotation(linear).output == {"": {"tp": R}}


def test_a_parameter_that_does_not_exist_is_refused_at_once():
    with pytest.raises(PlanError, match="did you mean 'weight'") as error:
        place(nn.Linear(2, 4), weigth={"tp": S(0)})
    assert error.value.code == "no-such-parameter"
    with pytest.raises(PlanError):
        place(nn.Linear(2, 4, bias=False), bias={"tp": S(0)})


def test_a_model_without_annotations_is_refused():
    with pytest.raises(PlanError) as error:
        Plan.from_annotations(nn.Linear(2, 2), mesh={"tp": 2})
    assert error.value.code == "no-annotations"
    assert annotation(nn.Linear(2, 2)) is None
