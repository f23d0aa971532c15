"""Llama is exact in float64: loss, every gradient and two AdamW steps, on every mesh and with every option."""

import pytest

from tests.distributed.models import FAMILIES

FAMILY = FAMILIES["llama"]
# Four tp ranks hold each of 2 kv heads twice; beside such heads every dim is cut evenly or the plan is refused.
FEW_HEADS = {"n_heads": 8, "vocab_size": 128}

CASES = [
    ("tp2", {}, False),
    ("tp4", FEW_HEADS, True),
    ("tp4", {"n_kv_heads": 4}, False),
    ("ddp4", {}, True),
    ("zero1", {}, False),
    ("zero2", {"tied": True}, True),
    ("dp_shard4", {}, False),
    ("dp_replicate2 x dp_shard2", {}, True),
    ("dp_shard2 x tp2+sp", {"tied": True, "qk_norm": True}, False),
    ("dp_shard2 x tp2+sp", {"dropout": 0.1}, True),
]


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


@pytest.mark.parametrize(("composition", "changes", "recompute"), CASES)
def test_loss_gradients_steps_and_collectives_are_those_of_one_device(composition, changes, recompute):
    receipt = FAMILY.verify(FAMILY.plan(composition, recompute=recompute), **changes)
    assert receipt.passed, str(receipt)
    # Rounding of float64 alone, far below the promised 1e-9.
    assert receipt.check("gradients").error < 1e-13
