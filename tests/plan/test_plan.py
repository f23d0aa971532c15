"""The plan as a value: its mesh, its mapping, and the equality of its spellings."""

import copy
import pickle

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.plan.placements import S
from meshplan.plan.plan import Input, Plan, Rule
from meshplan.plan.sections import Fsdp


def test_dataclasses_and_dicts_make_the_same_plan():
    python = Plan(
        mesh={"dp_shard": -1, "tp": 4},
        inputs={"tokens": Input(shape=(8, 2048), dtype=torch.int64, place={"dp": S(0)})},
        rules=[Rule("layers.*.wq", params={"weight": {"tp": S(0)}})],
        fsdp=Fsdp(units=["layers.*"], param_dtype=torch.bfloat16),
    )
    plain = Plan.from_dict(
        {
            "mesh": {"dp_shard": -1, "tp": 4},
            "inputs": {"tokens": {"dtype": "int64", "shape": [8, 2048], "place": {"dp": "S(0)"}}},
            "rules": [{"at": "layers.*.wq", "params": {"weight": {"tp": "S(0)"}}}],
            "fsdp": {"units": ["layers.*"], "param_dtype": "bfloat16"},
        }
    )
    assert python == plain
    assert python.to_dict() == plain.to_dict()
    assert Plan.from_dict(python.to_dict()) == python


def test_a_plan_survives_copying_and_pickling():
    plan = Plan({"tp": 2}, rules=[Rule("x", use="colwise")], compile={"units": "x"})
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)).rules[0].where == plan.rules[0].where


def test_the_order_of_axes_is_kept():
    assert list(Plan({"tp": 2, "dp_shard": 4}).mesh) == ["tp", "dp_shard"]


def test_an_axis_left_out_has_degree_one():
    plan = Plan({"dp_shard": -1, "tp": 1})
    assert [plan.degree(axis) for axis in ("pp", "tp", "dp_shard")] == [1, 1, -1]


@pytest.mark.parametrize(
    ("mesh", "expected", "hint"),
    [
        ({"dp": 2}, "unknown-axis", "dp_replicate"),
        ({"ep": 2}, "unknown-axis", "experts"),
        ({"dp_shards": 2}, "unknown-axis", "did you mean 'dp_shard'"),
        ({"tp": 0}, "bad-degree", "positive"),
        ({"tp": -2}, "bad-degree", "positive"),
        ({"tp": 2.0}, "bad-degree", "positive"),
        ({"tp": True}, "bad-degree", "positive"),
        ({"tp": "2"}, "bad-degree", "positive"),
        ({"tp": -1, "cp": -1}, "mesh-size", "at most"),
        (["tp"], "bad-value", "mapping"),
    ],
)
def test_a_mesh_of_unknown_axes_or_degrees_is_refused(mesh, expected, hint):
    with pytest.raises(PlanError) as error:
        Plan(mesh)
    assert error.value.code == expected
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"rule": []}, "unknown-key"),
        ({"rules": {"at": "x"}}, "bad-value"),
        ({"inputs": []}, None),
        ({"inputs": [1]}, "bad-value"),
        ({"inputs": {3: {}}}, "bad-value"),
        ({"regions": "local"}, "unknown-option"),
    ],
)
def test_keys_and_sections_are_checked(extra, expected):
    value = {"mesh": {"tp": 2}, **extra}
    if expected is None:
        assert Plan.from_dict(value) == Plan({"tp": 2})
        return
    with pytest.raises(PlanError) as error:
        Plan.from_dict(value)
    assert error.value.code == expected


def test_a_plan_needs_a_mesh():
    with pytest.raises(PlanError) as error:
        Plan.from_dict({"rules": []})
    assert error.value.code == "missing-key"


def test_an_input_of_offsets_names_the_input_whose_sequence_it_cuts():
    text = "mesh: {cp: 2}\ninputs:\n  x: {shape: [2, 8], dtype: int64}\n  cu: {shape: [3], dtype: int32, offsets: x}\n"
    plan = Plan.from_yaml(text)
    assert plan.inputs["cu"].offsets == "x" and Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize(
    "wrong", [{"dtype": "float32"}, {"shape": [3, 2]}, {"place": {"dp": "S(0)"}}, {"offsets": 3}], ids=str
)
def test_offsets_are_whole_integers(wrong):
    given = {"shape": [3], "dtype": "int32", "offsets": "x", **wrong}
    with pytest.raises(PlanError) as caught:
        Plan.from_dict({"mesh": {"cp": 2}, "inputs": {"cu": given}})
    assert caught.value.code == "bad-value"
