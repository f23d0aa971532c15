"""transformers' mixtures of experts, planned with nothing said about them but a number: exact on ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import meshplan as mp

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS: dict[str, Any] = {
    "Mixtral": partial(
        transformers.MixtralConfig, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.02,
        output_router_logits=True,
    ),
    "Qwen3Moe": partial(
        transformers.Qwen3MoeConfig, head_dim=8, intermediate_size=24, moe_intermediate_size=12, num_experts=8,
        num_experts_per_tok=3,
    ),
    "Olmoe": partial(transformers.OlmoeConfig, intermediate_size=12, num_experts=8, num_experts_per_tok=3),
    "DeepseekV3": partial(
        transformers.DeepseekV3Config, intermediate_size=24, moe_intermediate_size=12, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1, **LATENT,
    ),
    "GptOss": partial(
        transformers.GptOssConfig, head_dim=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


def made(name: str) -> nn.Module:
    """Parameters of norms and biases are no ones and zeros; experts are a loop, whose sizes depend on the routing."""
    torch.manual_seed(0)
    sizes = SIZES | ({"num_key_value_heads": 4} if name == "DeepseekV3" else {})
    config = CONFIGS[name](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    for key, p in model.named_parameters():
        if p.dim() == 1 or "bias" in key:
            nn.init.normal_(p, 1.0 if "norm" in key else 0.0, 0.2)
    return model.double()


def batch() -> dict[str, Any]:
    tokens = torch.randint(3, 61, (4, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :3] = labels[2, 5:] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


MESHES = {name: {"dp_shard": 2} for name in CONFIGS} | {"Qwen3Moe": {"dp_shard": 2, "tp": 2}}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_steps_are_those_of_one_device(name):
    """float64, but for norms, rotary angles and losses, which these models compute in float32."""
    mesh = MESHES[name]
    plan = mp.auto_plan(made(name), mesh, batch(), experts={"ep": 2})
    ranks = 1
    for n in mesh.values():
        ranks *= n
    receipt = mp.verify(partial(made, name), plan, nproc=ranks, inputs=batch, steps=2, rtol=1e-5)
    assert receipt.passed, str(receipt)


BLOCKS: dict[str, tuple[Any, str]] = {
    "Dbrx": (
        partial(
            transformers.DbrxConfig, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=61, pad_token_id=0,
            attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        "transformer.blocks.*.ffn",
    ),
    "LongcatFlash": (
        partial(
            transformers.LongcatFlashConfig, hidden_size=32, ffn_hidden_size=24, expert_ffn_hidden_size=12, num_layers=2,
            num_attention_heads=4, head_dim=4, vocab_size=61, n_routed_experts=4, zero_expert_num=2, moe_topk=2, pad_token_id=0,
            **LATENT,
        ),
        "model.layers.*.mlp",
    ),
}  # fmt: skip


def looped(name: str) -> nn.Module:
    """Their experts read the routing on the host, and hold all experts in parameters that ep could not split."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        BLOCKS[name][0](), attn_implementation="eager", experts_implementation="eager"
    )
    for key, p in model.named_parameters():
        nn.init.normal_(p, 1.0 if "norm" in key else 0.0, 0.2)
    return model.double()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_whose_experts_are_all_on_every_rank_need_no_tracing(name):
    experts = {"at": [BLOCKS[name][1]], "ep": 1}
    plan = mp.auto_plan(looped(name), {"dp_shard": 2}, batch(), experts=experts)
    receipt = mp.verify(partial(looped, name), plan, nproc=2, inputs=batch, steps=2, rtol=1e-5)
    assert receipt.passed, str(receipt)
