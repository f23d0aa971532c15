"""Sparse models on ranks: every loss of a router, its balancing bias and its experts are those of one device."""

import dataclasses

import torch

import meshplan as mp
from meshplan.models.deepseek import DeepSeekV3, deepseek_tiny
from meshplan.models.router_losses import RouterLosses

TOKENS = mp.Input(shape=(4, 24), dtype=torch.int64, place={"dp": mp.S(0)})
PLAN = mp.Plan(
    mesh={"dp_shard": 2},
    inputs={"tokens": TOKENS, "labels": TOKENS},
    experts={"at": ["layers.*.moe"], "ep": 2},
    fsdp={"units": ["layers.*"]},
)


def model() -> DeepSeekV3:
    torch.manual_seed(0)
    losses = RouterLosses(load_balance=0.3, z=0.2, sequence=0.4)
    return DeepSeekV3(dataclasses.replace(deepseek_tiny().config, losses=losses))


def test_two_steps_with_all_losses_are_those_of_one_device(pool):
    receipt = mp.verify(model, PLAN, nproc=2)
    assert receipt.passed, str(receipt)


def biases(parallel: bool) -> list[torch.Tensor]:
    """The balancing biases after two passes and an update."""
    made = mp.parallelize(model(), PLAN) if parallel else model()
    ids = torch.arange(96).view(4, 24) * 7 % 256
    batch = {"tokens": ids, "labels": ids}
    batch = mp.shard_batch(made, batch) if parallel else batch
    for _ in range(2):
        made(**batch).backward()
    made.update_biases(0.25)
    return [layer.moe.router.balance_bias.clone() for layer in made.layers if layer.moe is not None]


def test_biases_move_by_the_choices_of_all_ranks(pool):
    expected = biases(False)
    assert any(bias.unique().numel() > 1 for bias in expected)
    for found in pool.run(biases, True, world=2):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
