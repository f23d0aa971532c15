"""transformers' own models, unmodified, are exact to the float32 in which they compute rotary tables and losses."""

import pytest
import torch

import meshplan as mp
from tests.distributed.models import BATCH, FAMILIES, SEQ, world_of

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


@pytest.mark.parametrize(
    ("family", "composition", "attention", "changes", "recompute"),
    [
        ("hf-llama", "dp_shard2 x tp2+sp", "sdpa", {"tie_word_embeddings": True}, False),
        ("hf-llama", "tp4", "eager", {"num_attention_heads": 8, "vocab_size": 128}, True),
        ("hf-qwen3", "tp2+sp", "eager", {}, True),
        ("hf-qwen3", "dp_replicate2 x dp_shard2", "sdpa", {}, False),
        ("hf-gemma2", "dp_shard2 x tp2+sp", "eager", {}, True),
        ("hf-gpt2", "dp_shard2 x tp2+sp", "sdpa", {}, True),
        ("hf-gpt2", "ddp4", "eager", {}, False),
    ],
)
def test_plans_by_rules_give_the_loss_and_gradients_of_one_device(family, composition, attention, changes, recompute):
    plan = FAMILIES[family].plan(composition, recompute=recompute)
    receipt = FAMILIES[family].verify(plan, attn_implementation=attention, **changes)
    assert receipt.passed, str(receipt)


@pytest.mark.parametrize("family", ["hf-llama", "hf-qwen3", "hf-gemma2"])
def test_a_models_own_tensor_parallel_table_is_a_plan_that_is_exact(family):
    inputs = {name: mp.Input(shape=(BATCH, SEQ), dtype=torch.int64) for name in ("input_ids", "labels")}
    plan = mp.Plan.from_tp_plan(FAMILIES[family].model()(), mesh={"tp": 2}, inputs=inputs)
    receipt = FAMILIES[family].verify(plan)
    assert receipt.passed, str(receipt)
    assert world_of(plan) == receipt.world_size == 2
