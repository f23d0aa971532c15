"""Experts over ranks: every fold of the mesh, alone and composed, is one device's program, collective by collective."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import meshplan as mp
from tests.distributed.moe import EXPERTS, VOCAB, Experts, Listed, Moe
from tests.distributed.training import apart, full, on_this_rank, one_device

S = mp.S


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


def made(**options: Any) -> nn.Module:
    torch.manual_seed(7)
    return Moe(**options)


def batch(rows: int = 4, length: int = 6, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels[0, : length // 2] = -100  # data ranks count unequal numbers of tokens
    return {"tokens": torch.randint(0, VOCAB, (rows, length), generator=generator), "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def plan(mesh: dict[str, int], rules: tuple[mp.Rule, ...] = (), rows: int = 4, **sections: Any) -> mp.Plan:
    place: dict[str, Any] = {"dp": S(0)} if {"dp_shard", "dp_replicate"} & set(mesh) else {}
    place |= {"cp": S(1)} if "cp" in mesh else {}
    experts = {"at": ["layers.*.experts"], **sections.pop("experts")}
    inputs = {name: mp.Input(shape=(rows, 6), dtype=torch.int64, place=place) for name in ("tokens", "labels")}
    return mp.Plan(mesh=mesh, inputs=inputs, rules=rules, experts=experts, **sections)


SEQUENCE = (mp.Rule("embed", output={"tp": S(1)}), mp.Rule("head", input={"input": {"tp": mp.R}}))
FSDP = {"fsdp": {"units": ["layers.*"]}}
PLANS = {
    "ep 2": plan({"dp_shard": 2}, experts={"ep": 2}),
    "ep 4, fsdp": plan({"dp_shard": 4}, experts={"ep": 4}, **FSDP),
    "ep 2 of dp_shard 4, experts sharded over their copies": plan({"dp_shard": 4}, experts={"ep": 2}, **FSDP),
    "ep 2 of dp_shard 4, experts sharded along another dim": plan(
        {"dp_shard": 4}, experts={"ep": 2}, fsdp={"units": ["layers.*"], "shard_dims": {"layers.*.experts.up": 1}}
    ),
    "ep 2 of dp_shard 4, zero2, once per expert": plan(
        {"dp_shard": 4}, experts={"ep": 2, "dispatch": "alltoall"}, fsdp={"units": ["layers.*"], "strategy": "zero2"}
    ),
    "ep 2 by allgather": plan({"dp_shard": 2}, experts={"ep": 2, "dispatch": "allgather"}),
    "ep 4 by two levels, a node of 2": plan({"dp_shard": 4}, experts={"ep": 4, "dispatch": "twolevel", "inner": 2}, **FSDP),
    "ep 4 of dp_shard 2 and tp 2, tp in a node": plan(
        {"dp_shard": 2, "tp": 2}, experts={"ep": 4, "dispatch": "twolevel", "inner": 2}, **FSDP
    ),
    "ep 4 of dp_shard 8, two levels, experts sharded over their copies": plan(
        {"dp_shard": 8}, rows=8, experts={"ep": 4, "dispatch": "twolevel", "inner": 2}, **FSDP
    ),
    "ep 2 in 8 bits": plan({"dp_shard": 2}, experts={"ep": 2, "payload": "fp8"}, **FSDP),
    "ep 4 by two levels in 8 bits": plan(
        {"dp_shard": 4}, experts={"ep": 4, "dispatch": "twolevel", "inner": 2, "payload": "fp8"}
    ),
    "ep 2, hsdp": plan({"dp_replicate": 2, "dp_shard": 2}, experts={"ep": 2}, **FSDP),
    "ep 2 of tp, tokens whole": plan({"tp": 2}, experts={"ep": 2}),
    "ep 4 of dp_shard 2 and tp 2": plan({"dp_shard": 2, "tp": 2}, experts={"ep": 4}, **FSDP),
    "ep 2 x tp 2 + sp, fsdp": plan({"dp_shard": 2, "tp": 2}, SEQUENCE, experts={"ep": 2}, **FSDP),
    "ep 2 x etp 2, tokens whole": plan({"dp_shard": 2, "tp": 2}, experts={"ep": 2, "etp": 2}, **FSDP),
    "ep 2 x etp 2 + sp": plan({"dp_shard": 2, "tp": 2}, SEQUENCE, experts={"ep": 2, "etp": 2}),
    "ep 4 x etp 2": plan({"dp_shard": 4, "tp": 2}, experts={"ep": 4, "etp": 2}, **FSDP),
    "ep 2 x cp 2": plan({"dp_shard": 2, "cp": 2}, experts={"ep": 2}, **FSDP),
    "ep 4 of dp_shard 2 and cp 2, recomputed": plan(
        {"dp_shard": 2, "cp": 2}, experts={"ep": 4}, **FSDP, recompute={"units": ["layers.*"], "policy": "full"}
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_two_steps_with_weight_decay_are_those_of_one_device(case):
    given = PLANS[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    inputs = functools.partial(batch, given.inputs["tokens"].shape[0])
    receipt = mp.verify(made, given, nproc=n, inputs=inputs, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)


@pytest.mark.parametrize("case", ["ep 2 of dp_shard 4, experts sharded over their copies", "ep 4 of dp_shard 2 and tp 2"])
def test_accumulated_and_clipped_steps_are_those_of_one_device(pool, case):
    given = PLANS[case]
    steps = [[batch(seed=2 * i), batch(seed=2 * i + 1)] for i in range(3)]
    want = one_device(made, steps, adamw, clip=0.5)
    assert want.norms[0] > 0.5  # clipping does something
    for rank in pool.run(on_this_rank, made, given, steps, adamw, clip=0.5, world=4):
        assert rank.norms == pytest.approx(want.norms, rel=1e-12)  # each expert counted once
        assert apart(rank.gradients, want.gradients) < 1e-9
        assert apart(rank.parameters, want.parameters) < 1e-9


def _saved(given: mp.Plan, folder: str) -> None:
    model = mp.parallelize(made(), given)
    mp.save(folder, model)


def _loaded(given: mp.Plan, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = mp.parallelize(Moe(), given)
    mp.load(folder, model)
    return {name: full(p) for name, p in model.named_parameters()}


def test_a_checkpoint_of_one_fold_is_loaded_into_another(pool, tmp_path):
    folder = str(tmp_path / "saved")
    pool.run(_saved, PLANS["ep 2 of dp_shard 4, experts sharded over their copies"], folder, world=4)
    want = dict(made().named_parameters())
    for found in pool.run(_loaded, PLANS["ep 2 of tp, tokens whole"], folder, world=2):
        assert all(torch.equal(found[name], p) for name, p in want.items())


ROUTINGS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "all tokens to the last expert": ({"k": 1, "skew": 50.0}, (2, 5)),
    "the last expert idle": ({"k": 3, "skew": -50.0}, (2, 5)),
    "one token, on one of two ranks": ({"k": 2}, (1, 1)),
    "all experts for each token": ({"k": EXPERTS}, (2, 3)),
}


@pytest.mark.parametrize("dispatch", ["auto", "alltoall", "allgather"])
@pytest.mark.parametrize("case", ROUTINGS)
def test_any_routing_is_exact(case, dispatch):
    options, shape = ROUTINGS[case]
    given = plan({"tp": 2}, experts={"ep": 2, "dispatch": dispatch})
    receipt = mp.verify(
        functools.partial(made, layers=1, **options), given, nproc=2, inputs=functools.partial(batch, *shape), steps=2,
        optimizer=adamw,
    )  # fmt: skip
    assert receipt.passed, str(receipt)


def test_experts_that_are_modules_stay_where_they_are_and_compute_on_their_rank():
    given = plan({"dp_shard": 2}, experts={"ep": 2}, **FSDP)
    receipt = mp.verify(functools.partial(made, kind=Listed), given, nproc=2, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)


@pytest.mark.parametrize("kind", [Experts, Listed])
def test_data_parallel_alone_takes_a_loop_over_experts_too(kind):
    given = plan({"dp_shard": 2}, experts={"ep": 1}, **FSDP)
    receipt = mp.verify(functools.partial(made, kind=kind), given, nproc=2, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)
