"""What a plan means as DTensor placements: mesh dims, shards that divide, inputs and boundaries."""

import pytest
import torch
from torch import nn

import meshplan as mp
from meshplan.compiler.dtensor_plan import DTensorPlan, dtensor_plan
from meshplan.mesh.spec import MeshSpec

ROWS = {"dp": mp.S(0)}


def made(mesh: dict[str, int], place=ROWS, rules=(), **more) -> DTensorPlan:
    world = 1
    for n in mesh.values():
        world *= n
    inputs = {"input": mp.Input(shape=(8, 6), dtype=torch.float32, place=place)}
    plan = mp.Plan(mesh=mesh, inputs=inputs, rules=rules, **more)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5))
    return dtensor_plan(model, plan, MeshSpec.resolve(mesh, world))


def test_data_axes_that_the_plan_does_not_tell_apart_are_one_dim():
    plan = made({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    assert plan.dims == (("dp_replicate", "dp_shard"), ("tp",))
    assert plan.data == (True, False)
    assert plan.input("input", 2) == (0, None)


def test_data_axes_with_layouts_of_their_own_stay_apart():
    plan = made({"dp_replicate": 2, "dp_shard": 2}, place={"dp_shard": mp.S(0)})
    assert plan.dims == (("dp_replicate",), ("dp_shard",))
    assert plan.input("input", 2) == (None, 0)


def test_parameters_are_stored_over_data_ranks_along_a_free_dim_that_divides_and_used_whole():
    rules = [mp.Rule("0", use="colwise")]
    plan = made({"dp_shard": 2, "tp": 2}, rules=rules, fsdp={"units": ["0"]})
    assert plan.params == {
        "0.weight": (1, 0),  # [10, 6]: dim 0 is tp's, dim 1 divides by 2
        "0.bias": (None, 0),  # [10]: its only dim is tp's
        "1.weight": (1, None),  # [5, 10]: 5 does not divide
        "1.bias": (None, None),
    }
    assert {name: tp for name, (_, tp) in plan.compute.items() if tp is not None} == {"0.weight": 0, "0.bias": 0}
    assert {data for data, _ in plan.compute.values()} == {None}
    assert dict(plan.core.params["0.weight"].shards) == {"dp_shard": mp.S(1), "tp": mp.S(0)}


@pytest.mark.parametrize("more", [{}, {"fsdp": {"units": [], "strategy": "ddp"}}], ids=["none", "ddp"])
def test_without_sharding_parameters_are_whole_on_data_axes(more):
    assert set(made({"dp_shard": 2}, **more).params.values()) == {(None,)}


def test_boundaries_are_declared_by_mesh_dim():
    rules = [mp.Rule("1", input={"tp": mp.R}, output={"tp": mp.S(1)})]
    plan = made({"dp_shard": 2, "tp": 2}, rules=rules)
    assert plan.declared("1", "input", "input") == {1: mp.R}
    assert plan.declared("1", "output", "") == {1: mp.S(1)}
    assert plan.declared("0", "output", "") == {}
