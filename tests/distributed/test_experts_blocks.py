"""Blocks that loop over a list of experts in their own forward, unedited: one device's program on every fold of the mesh."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import meshplan as mp
from tests.covering import covering
from tests.distributed.moe_blocks import EXPERTS, Counting, Looped, Masked, Sorted
from tests.distributed.test_experts import FSDP, SEQUENCE, adamw, batch
from tests.distributed.training import apart, built, full, on_this_rank, one_device

S = mp.S


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


def made(kind: type[nn.Module] = Masked, **options: Any) -> nn.Module:
    torch.manual_seed(7)
    return Looped(kind, **options)


def plan(
    mesh: dict[str, int], rules: tuple[mp.Rule, ...] = (), shape: tuple[int, int] = (4, 6), **sections: Any
) -> mp.Plan:
    place: dict[str, Any] = {"dp": S(0)} if {"dp_shard", "dp_replicate"} & set(mesh) else {}
    place |= {"cp": S(1)} if "cp" in mesh else {}
    experts = {"at": ["layers.*.moe"], **sections.pop("experts")}
    inputs = {name: mp.Input(shape=shape, dtype=torch.int64, place=place) for name in ("tokens", "labels")}
    return mp.Plan(mesh=mesh, inputs=inputs, rules=rules, experts=experts, **sections)


RECOMPUTE = {"recompute": {"units": ["layers.*"], "policy": "full"}}
PLANS = {
    "ep 2": plan({"dp_shard": 2}, experts={"ep": 2}),
    "ep 4, fsdp": plan({"dp_shard": 4}, experts={"ep": 4}, **FSDP),
    "ep 2 of dp_shard 4, fsdp, recomputed": plan({"dp_shard": 4}, experts={"ep": 2}, **FSDP, **RECOMPUTE),
    "ep 1, fsdp": plan({"dp_shard": 2}, experts={"ep": 1}, **FSDP),
    "ep 2 by allgather, hsdp": plan(
        {"dp_replicate": 2, "dp_shard": 2}, experts={"ep": 2, "dispatch": "allgather"}, **FSDP
    ),
    "ep 4, to each of two nodes once": plan({"dp_shard": 4}, experts={"ep": 4, "dispatch": "twolevel", "inner": 2}),
    "ep 2, rows of 8 bits": plan({"dp_shard": 2}, experts={"ep": 2, "payload": "fp8"}),
    "ep 2 of tp, tokens whole, recomputed": plan({"tp": 2}, experts={"ep": 2}, **RECOMPUTE),
    "ep 2 of dp_shard beside tp 2, tokens whole": plan({"dp_shard": 2, "tp": 2}, experts={"ep": 2}, **FSDP),
    "ep 2 x tp 2 + sp": plan({"dp_shard": 2, "tp": 2}, SEQUENCE, experts={"ep": 2}, **FSDP),
    "ep 4 of dp_shard 2 and cp 2": plan({"dp_shard": 2, "cp": 2}, experts={"ep": 4}, **FSDP),
}


@pytest.mark.parametrize(("case", "kind"), covering(PLANS, [Masked, Counting, Sorted]))
def test_two_steps_with_weight_decay_are_those_of_one_device(case, kind):
    given = PLANS[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    receipt = mp.verify(functools.partial(made, kind), given, nproc=n, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)


ROUTINGS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "all tokens to the last expert": ({"k": 1, "skew": 50.0}, (2, 5)),
    "the last expert idle": ({"k": 3, "skew": -50.0}, (2, 5)),
    "one token, on one of two ranks": ({"k": 2}, (1, 1)),
    "all experts for each token": ({"k": EXPERTS}, (2, 3)),
}


@pytest.mark.parametrize(("case", "kind"), covering(ROUTINGS, [Masked, Counting, Sorted]))
def test_any_routing_is_exact(case, kind):
    options, shape = ROUTINGS[case]
    given = plan({"tp": 2}, experts={"ep": 2})
    receipt = mp.verify(
        functools.partial(made, kind, layers=1, **options), given, nproc=2, inputs=functools.partial(batch, *shape), steps=2,
        optimizer=adamw,
    )  # fmt: skip
    assert receipt.passed, str(receipt)


def _counted(given: mp.Plan, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    model = mp.parallelize(built(functools.partial(made, Counting)), given)
    for one in batches:
        model(**mp.shard_batch(model, one)).backward()
    return dict(model.named_buffers())


@pytest.mark.parametrize(
    "case",
    [
        "ep 2 of dp_shard 4, fsdp, recomputed", "ep 2 of dp_shard beside tp 2, tokens whole", "ep 2 x tp 2 + sp",
        "ep 4 of dp_shard 2 and cp 2",
    ],
)  # fmt: skip
def test_buffers_count_each_token_once_in_both_runs_of_a_block_and_in_recompute(pool, case):
    batches = [batch(seed=1), batch(seed=2)]
    model = built(functools.partial(made, Counting))
    for one in batches:
        model(**one).backward()
    want = dict(model.named_buffers())
    assert (
        want["layers.0.moe.load"].sum() == 2 * 4 * 6 * 2 and want["layers.0.moe.calls"] == 2
    )  # batches, tokens, choices
    for found in pool.run(_counted, PLANS[case], batches, world=4):
        assert all(torch.equal(found[name], b) for name, b in want.items() if "load" in name or "calls" in name)


def _load(given: mp.Plan, one: dict[str, Any]) -> dict[str, Any]:
    model = mp.parallelize(built(functools.partial(made, Counting)), given)
    with mp.expert_load() as load:
        model(**mp.shard_batch(model, one)).backward()
    return load.to_json()


def test_the_report_of_a_step_counts_what_a_block_chooses(pool):
    model = built(functools.partial(made, Counting))
    model(**batch())
    for found in pool.run(_load, PLANS["ep 2 of dp_shard 4, fsdp, recomputed"], batch(), world=4):
        assert {path: one["experts"] for path, one in found.items()} == {
            f"layers.{i}.moe": layer.moe.load.tolist() for i, layer in enumerate(model.layers)
        }


@pytest.mark.parametrize("kind", [Masked, Counting])
@pytest.mark.parametrize("case", ["ep 2 of dp_shard 4, fsdp, recomputed", "ep 2 of dp_shard beside tp 2, tokens whole"])
def test_accumulated_and_clipped_steps_are_those_of_one_device(pool, case, kind):
    factory = functools.partial(made, kind)
    steps = [[batch(seed=2 * i), batch(seed=2 * i + 1)] for i in range(2)]
    want = one_device(factory, steps, adamw, clip=0.5)
    assert want.norms[0] > 0.5  # clipping does something
    for rank in pool.run(on_this_rank, factory, PLANS[case], steps, adamw, clip=0.5, world=4):
        assert rank.norms == pytest.approx(want.norms, rel=1e-12)
        assert apart(rank.gradients, want.gradients) < 1e-9
        assert apart(rank.parameters, want.parameters) < 1e-9


@pytest.mark.parametrize(("kind", "missing"), [(Masked, False), (Counting, True)])
def test_an_idle_expert_has_a_gradient_where_it_has_one_on_one_device(pool, kind, missing):
    """Masked calls it without a row: zeros, and weight decay. Counting leaves it alone."""
    factory = functools.partial(made, kind, skew=-50.0)
    want = one_device(factory, [[batch()]], adamw)
    idle = f"layers.0.moe.experts.{EXPERTS - 1}.w1.weight"
    assert (idle not in want.gradients) == missing
    for rank in pool.run(on_this_rank, factory, PLANS["ep 4, fsdp"], [[batch()]], adamw, world=4):
        assert apart(rank.gradients, want.gradients) < 1e-9
        assert apart(rank.parameters, want.parameters) < 1e-9


def _saved(given: mp.Plan, folder: str) -> None:
    mp.save(folder, mp.parallelize(made(), given))


def _loaded(given: mp.Plan, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = mp.parallelize(Looped(), given)
    mp.load(folder, model)
    return {name: full(p) for name, p in model.named_parameters()}


def test_a_checkpoint_of_one_fold_is_loaded_into_another(pool, tmp_path):
    folder = str(tmp_path / "saved")
    pool.run(_saved, PLANS["ep 4, fsdp"], folder, world=4)
    want = dict(made().named_parameters())
    for found in pool.run(_loaded, PLANS["ep 2 of tp, tokens whole, recomputed"], folder, world=2):
        assert all(torch.equal(found[name], p) for name, p in want.items())


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_a_derived_plan_finds_the_blocks(mesh):
    given = mp.auto_plan(made(), mesh, batch(), experts={"ep": 2})
    assert given.experts is not None and given.experts.at == ("layers.*.moe",)
    n = functools.reduce(int.__mul__, mesh.values())
    receipt = mp.verify(made, given, nproc=n, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)
