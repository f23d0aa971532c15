"""`regions: dtensor`: exact on ranks, collectives as rehearsed; refused before anything is sent where it cannot be."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import meshplan as mp
from tests.lowering.region_models import DrawsNoise, DTensorIsWrongHere, WritesInPlace, llama, llama_plan, wrong_plan


def test_llama_over_data_and_tensor_axes_with_shards_recompute_and_dropout(pool):
    plan = llama_plan(
        {"dp_shard": 2, "tp": 2}, regions="dtensor", fsdp={"units": ["layers.*"]}, recompute={"units": ["layers.*"]}
    )
    receipt = mp.verify(llama, plan, nproc=4)
    receipt.raise_if_failed()
    assert "collectives" in [check.name for check in receipt.checks]


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_calls_with_wrong_rules_give_the_single_device_numbers(pool, mesh):
    mp.verify(DTensorIsWrongHere, wrong_plan(mesh), nproc=2).raise_if_failed()


def outputs_and_gradients() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """On a rank: the local output of a linear layer, and its weight's gradient from a loss outside the model."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    inputs = {"input": mp.Input(shape=(4, 3), dtype=torch.float64, place={"dp": mp.S(0)})}
    plan = mp.Plan(mesh={"dp_shard": 2}, inputs=inputs)
    mp.parallelize(model, plan, regions="dtensor")
    y = model(**mp.shard_batch(model, {"input": x}))
    loss = mp.token_mean((y**2).sum(1), torch.tensor([True, dist.get_rank() == 0]))
    loss.backward()
    return y.detach(), model.weight.grad.full_tensor(), list(y.shape)


def test_outputs_are_this_ranks_rows_and_outside_losses_give_whole_gradients(pool):
    torch.manual_seed(0)
    one = torch.nn.Linear(3, 2).double()
    y = one(torch.arange(12.0, dtype=torch.float64).view(4, 3))
    (y[[0, 1, 2]] ** 2).sum().div(3).backward()
    for rank, (mine, gradient, shape) in enumerate(pool.run(outputs_and_gradients, world=2)):
        assert shape == [2, 2]
        torch.testing.assert_close(mine, y[2 * rank : 2 * rank + 2].detach(), rtol=1e-14, atol=0)
        torch.testing.assert_close(gradient, one.weight.grad, rtol=1e-13, atol=1e-13)


def trained(folder: str) -> tuple[float, torch.Tensor, torch.Tensor]:
    """On a rank: two accumulated microbatches of a sharded layer, the norm they are clipped by, a step, and what a
    checkpoint gives back."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    inputs = {"input": mp.Input(shape=(4, 3), dtype=torch.float64, place={"dp": mp.S(0)})}
    plan = mp.Plan(mesh={"dp_shard": 2}, inputs=inputs, fsdp={"units": []}, regions="dtensor")
    mp.parallelize(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.arange(24.0, dtype=torch.float64).view(2, 4, 3)
    with mp.accumulate(model, steps=2):
        for part in x:
            mp.token_mean((model(**mp.shard_batch(model, {"input": part})) ** 2).sum(1)).backward()
    norm = mp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mp.save(folder, model, optimizer)
    stepped = model.weight.full_tensor().clone()
    with torch.no_grad():
        model.weight.zero_()
    mp.load(folder, model, optimizer)
    return float(norm), stepped, model.weight.full_tensor()


def test_accumulation_clipping_and_checkpoints_meet_dtensor_parameters(pool, tmp_path):
    torch.manual_seed(0)
    one = torch.nn.Linear(3, 4).double()
    for part in torch.arange(24.0, dtype=torch.float64).view(2, 4, 3):
        (one(part) ** 2).sum(1).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0).item()
    torch.optim.SGD(one.parameters(), lr=0.5).step()
    for got, stepped, loaded in pool.run(trained, str(tmp_path / "saved"), world=2):
        assert got == pytest.approx(norm, rel=1e-12)
        torch.testing.assert_close(stepped, one.weight.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(loaded, stepped)


def lower(model: torch.nn.Module, plan: mp.Plan | None = None) -> mp.Lowered:
    if plan is None:
        inputs = {"x": mp.Input(shape=(4, 6), dtype=torch.float32, place={"dp": mp.S(0)})}
        plan = mp.Plan(mesh={"dp_shard": 2}, inputs=inputs)
    return mp.lower(model, plan, world_size=2, regions="dtensor")


@pytest.mark.parametrize(("model", "code"), [(WritesInPlace, "in-place"), (DrawsNoise, "random-op")])
def test_what_would_differ_between_ranks_is_refused_when_lowered(model, code):
    with pytest.raises(mp.PlanError) as caught:
        lower(model())
    assert caught.value.code == code
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "more",
    [
        {"fsdp": {"units": [], "param_dtype": "bfloat16"}},
        {"compile": {"units": ["up"]}},
        {"recompute": {"units": ["up"], "policy": "none", "gather": "regather"}},
    ],
)
def test_options_that_dtensor_regions_do_not_have_are_refused(more):
    inputs = {"x": mp.Input(shape=(4, 6), dtype=torch.float32, place={"dp": mp.S(0)})}
    with pytest.raises(mp.PlanError) as caught:
        lower(WritesInPlace(), mp.Plan(mesh={"dp_shard": 2}, inputs=inputs, **more))
    assert caught.value.code == "dtensor-option"


def test_lowered_says_dtensor_and_where_its_collectives_come_from():
    with torch.device("meta"):
        model = DTensorIsWrongHere()
    low = lower(model, replace(wrong_plan({"tp": 2}), regions="auto"))
    assert low.regions == {"down": "dtensor", "fused": "dtensor"}
    d = low.to_json()
    assert d["predicted"] is True
    assert "one run on fake tensors" in d["notes"][0]
    assert {c["axis"] for c in d["collectives"]} == {"tp"}
    # x [8, 6] meets columns of fused [12, 6]: its outputs are gathered before they are split, 8 x 12 elements.
    assert ("forward", "all_gather", 8 * 12) in {(c["phase"], c["op"], c["elements"]) for c in d["collectives"]}


def lowered_beside_a_world() -> tuple[bool, int, str]:
    low = mp.lower(DTensorIsWrongHere(), wrong_plan({"tp": 2}), world_size=2)
    return low.predicted, len(low.to_json()["collectives"]), low.to_json()["notes"][0]


def test_inside_a_process_group_collectives_are_said_not_to_be_predicted(pool):
    predicted, count, note = pool.run(lowered_beside_a_world, world=1)[0]
    assert (predicted, count) == (False, 0)
    assert "not predicted" in note


def test_an_unknown_region_is_refused():
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(WritesInPlace(), mp.Plan(mesh={"tp": 2}), world_size=2, regions="dtensors")
    assert caught.value.code == "unknown-option"
