"""GPT-2, with its fused q|k|v, biases, learned positions and tied head, is exact in float64."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshplan as mp
from meshplan.models.gpt import GPT
from tests.distributed.models import FAMILIES

FAMILY = FAMILIES["gpt"]


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


@pytest.mark.parametrize(
    ("composition", "changes", "recompute"),
    [
        ("tp4", {}, False),
        ("tp2+sp", {"dropout": 0.1}, True),
        ("zero1", {}, True),
        ("dp_replicate2 x dp_shard2", {}, False),
        ("dp_shard2 x tp2+sp", {"dropout": 0.1}, True),
    ],
)
def test_loss_gradients_steps_and_collectives_are_those_of_one_device(composition, changes, recompute):
    receipt = FAMILY.verify(FAMILY.plan(composition, recompute=recompute), **changes)
    assert receipt.passed, str(receipt)
    assert receipt.check("gradients").error < 1e-13


def _numbered() -> GPT:
    """A GPT whose fused projections hold their own flat indices, so that a permuted row cannot hide."""
    model = FAMILY.model()().double()
    with torch.no_grad():
        for block in model.h:
            for p in block.attn.c_attn.parameters():
                p.copy_(torch.arange(p.numel(), dtype=p.dtype).view_as(p))
    return model


def _gathered() -> list[tuple[str, str, torch.Tensor]]:
    model: nn.Module = mp.parallelize(_numbered(), FAMILY.plan("dp_shard2 x tp2+sp"))
    fused = {n: p for n, p in model.named_parameters() if "c_attn" in n}
    assert all(isinstance(p, DTensor) for p in fused.values())
    return [(n, str(tuple(p.to_local().shape)), p.full_tensor().detach()) for n, p in fused.items()]


def test_fused_parameters_gather_in_the_users_row_order_and_their_bias_is_whole_on_data_ranks(pool):
    # Each of two tp ranks holds 20 rows of q, of k and of v; each of two dp_shard ranks 20 of the weight's 40 columns.
    for parameters in pool.run(_gathered, world=4):
        for name, local, full in parameters:
            assert local == ("(60, 20)" if name.endswith("weight") else "(60,)")
            assert torch.equal(full.view(-1), torch.arange(full.numel(), dtype=full.dtype))
