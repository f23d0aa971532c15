"""Meshes that do not fit the world, axes of size 1, and ranks that do not agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused
from tests.faults.test_uneven import PAIR, Mlp

X = {"x": numbers(4, 8)}


@pytest.mark.parametrize(("mesh", "world"), [({"dp_shard": 4}, 6), ({"dp_shard": -1, "tp": 4}, 6), ({"tp": 3}, 4)])
def test_a_mesh_that_does_not_multiply_to_the_world_is_refused(mesh, world):
    # axolotl#2977: floor division left ranks over. Both numbers and what would fit are said.
    error = refused(Mlp, plan_of(X, mesh=mesh), "mesh-size", world)
    assert str(world) in error.message and str(max(mesh.values())) in error.message and error.legal


def test_an_unknown_axis_is_refused_with_the_nearest_name():
    with pytest.raises(mp.PlanError, match="did you mean 'tp'") as caught:
        plan_of(X, mesh={"tpp": 2})
    assert caught.value.code == "unknown-axis" and caught.value.where.line


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"dp_replicate": 1, "dp_shard": 1, "tp": 1}])
def test_axes_of_one_rank_are_the_plain_model_without_communication(pool, mesh):
    # pytorch#127213, accelerate#3798: missing axes count as size 1.
    exact(Mlp, plan_of(X, *PAIR, mesh=mesh), 1)
    assert mp.lower(Mlp(), plan_of(X, *PAIR, mesh=mesh), 1).collectives == []


def test_an_axis_of_one_beside_another(pool):
    exact(Mlp, plan_of({"x": numbers(4, 8, dp=mp.S(0))}, *PAIR, mesh={"dp_shard": 2, "tp": 1}), 2)


def differing(what: str) -> tuple[str, str]:
    """On a rank: what `parallelize` raises when rank 1 has another plan, model or error."""
    rank, hidden, rules = dist.get_rank(), 6, PAIR
    torch.manual_seed(0)
    if rank == 1 and what == "plan":
        rules = PAIR[:1]
    if rank == 1 and what == "model":
        hidden = 8
    if rank == 1 and what == "values":
        torch.manual_seed(7)
    if rank == 1 and what == "error":
        rules = (mp.Rule("upp", use="colwise"),)
    try:
        mp.parallelize(Mlp(hidden), plan_of(X, *rules))
    except mp.PlanError as error:
        return error.code, error.message
    return "none", ""


@pytest.mark.parametrize(
    ("what", "codes"),
    [
        ("plan", ["ranks-differ"] * 2),
        ("model", ["ranks-differ"] * 2),
        ("values", ["ranks-differ"] * 2),
        ("error", ["rank-failed", "no-such-module"]),
    ],
)
def test_if_one_rank_differs_or_fails_every_rank_raises(pool, what, codes):
    answers = pool.run(differing, what, world=2)
    assert [code for code, _ in answers] == codes
    assert "1" in answers[0][1]


class InAnOrder(nn.Module):
    """Uses two parameters of one shape in an order that its process chose, as code that iterates over a set does."""

    def __init__(self, order: tuple[str, str]) -> None:
        super().__init__()
        self.order = order
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.eye(8) * (1 + n)) for n, name in enumerate("ab")})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = x + F.linear(x, self.weights[name]).softmax(-1)
        return x.square().mean()


def in_another_order() -> str:
    """On a rank: what `parallelize` raises; the same collectives of the same sizes would be made of unlike values."""
    rules = [mp.Rule("", params={f"weights.{name}": {"tp": mp.S(0)} for name in "ab"})]
    try:
        mp.parallelize(InAnOrder(("a", "b") if dist.get_rank() else ("b", "a")), plan_of(X, *rules))
    except mp.PlanError as error:
        return f"{error.code}: {error}"
    return "none"


def test_ranks_whose_python_took_another_order_are_told_before_they_mix_values(pool):
    for said in pool.run(in_another_order, world=2):
        assert said.startswith("ranks-differ") and "what the model itself calls" in said and "PYTHONHASHSEED" in said
        assert "boundaries" not in said and "calls:" not in said.replace("itself calls:", "")


def order_of_a_set() -> list[str]:
    return list({"sliding_attention", "full_attention", "chunked_attention", "linear_attention"})


def test_the_ranks_of_a_pool_take_the_strings_of_a_set_in_one_order(pool):
    assert len({tuple(order) for order in pool.run(order_of_a_set, world=2)}) == 1


def refused_before_any_collective() -> tuple[str, int]:
    from meshplan.runtime.recorder import record_collectives

    with record_collectives() as log:
        try:
            mp.parallelize(Mlp(), plan_of({"x": numbers(5, 8, dp=mp.S(0))}, mesh={"dp_shard": 2}))
        except mp.PlanError as error:
            return error.code, len(list(log))
    return "none", -1


def test_a_refusal_comes_before_any_collective(pool):
    assert pool.run(refused_before_any_collective, world=2) == [("input-not-divisible", 0)] * 2


def parallelized_twice() -> str:
    model = mp.parallelize(Mlp(), plan_of(X, *PAIR))
    try:
        mp.parallelize(model, plan_of(X, *PAIR))
    except mp.PlanError as error:
        return error.code
    return "none"


def test_parallelizing_twice_is_refused(pool):
    assert pool.run(parallelized_twice, world=2) == ["already-parallelized"] * 2


def test_a_model_that_was_sharded_by_hand_is_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Mlp()
        spread = distribute_tensor(model.up.weight, init_device_mesh("cpu", (2,)), [Shard(0)])
        model.up.weight = torch.nn.Parameter(spread)
        refused(lambda: model, plan_of(X, *PAIR), "already-sharded")
    finally:
        dist.destroy_process_group()
