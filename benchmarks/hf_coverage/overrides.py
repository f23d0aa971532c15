"""What the names of a config's fields do not say: sizes that must fit each other, by model type."""

from __future__ import annotations

from typing import Any

import torch

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
_QWEN4 = {
    **_INDEXER, "hc_lowrank": 24, "ple_embed_dim": 16, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 2, "heads_per_ngram": 2,
}  # fmt: skip

NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""Without these the defaults of a type make no model."""

OVERRIDES: dict[str, dict[str, Any]] = {
    # What its first forward on so short a sequence switches to anyway, by making modules anew.
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": NEEDED["cohere_compass_text"],
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "intermediate_size": [88] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0],
    },
    "git": {"vision_config": {"image_size": 8, "patch_size": 4}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "is_decoder": True, "axial_pos_embds": False, "lsh_attn_chunk_length": 7, "local_attn_chunk_length": 7,
        "attn_layers": ["local", "lsh"], "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128,
        "attention_head_dim": 32, "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 32, "n_mamba_heads": 4,
        "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
    },
}  # fmt: skip

_CODES = torch.arange(4 * 4 * 14).mul(37).remainder(97) + 3  # batch 4, codebooks 4, sequence 14
_SPOKEN = {"input_ids": _CODES.reshape(16, 14), "labels": _CODES.flip(0).reshape(4, 14, 4)}
BATCHES: dict[str, dict[str, Any]] = {
    "blt": {"patch_lengths": torch.tensor([[1, 4, 3, 4, 2], [1, 3, 3, 3, 4], [2, 2, 4, 3, 3], [1, 4, 4, 4, 1]])},
    "musicgen": _SPOKEN,
    "musicgen_melody": _SPOKEN,
    "git": {"pixel_values": torch.linspace(-1, 1, 4 * 3 * 8 * 8, dtype=torch.float64).sin().reshape(4, 3, 8, 8)},
}

PADDED = frozenset(
    "camembert data2vec-text emu3 emu3_text_model modernbert-decoder musicgen_decoder musicgen_melody_decoder prophetnet roberta "
    "roberta-prelayernorm xlm xlm-roberta xlm-roberta-xl xmod".split()
)
"""Config types whose models are not built without a padding token."""
PADS = frozenset(
    "gemma4 gemma4_text gemma4_unified gemma4_unified_text musicgen_decoder musicgen_melody_decoder".split()
)
"""Those whose forward needs one. The others have none once they are built: with one, and no attention mask, transformers
reads the ids on the host to warn of padding."""

PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Where the class is built from a part of the config, which the auto class does not know."""

FLOAT32 = {
    "inkling2_loop_text": "multiplies float32 activations by a parameter",
    "inkling2_text": "multiplies float32 activations by a parameter",
    "xglm": "makes a constant of the smallest float64 in float32",
}
"""Types that do not run in float64."""

EVALUATED = {
    "gemma3n_text": "clamps its own parameters in forward while it trains",
    "phimoe": "draws routing noise while it trains",
}
"""Types that are compared in evaluation mode, with gradients."""

NOT_RUN = {
    "gemma3n": "its vision tower is of the timm library",
    "gemma4_assistant": "runs on the key/value states of another model only",
    "gemma4_unified_assistant": "runs on the key/value states of another model only",
}
"""Types that cannot run here, with the reason."""
