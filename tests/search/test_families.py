"""Families of transformers that are not plain decoders: derived plans are exact on tensor and data parallel ranks."""

from __future__ import annotations

import pytest
import torch

import meshplan as mp
from meshplan.search.auto import derive

transformers = pytest.importorskip("transformers", reason="the hf extra")


def t5():
    """Encoder-decoder with relative positions, a gated MLP and a head of its own."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=66, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
            use_cache=False, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        )
    )  # fmt: skip


def vit():
    """Patches by convolution, a class token, learned positions."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=44, image_size=12, patch_size=4,
            num_labels=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def whisper():
    """Audio: strided convolutions, sinusoids, cross attention, a tied head."""
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=66, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=44, decoder_ffn_dim=44, max_source_positions=10, max_target_positions=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False, suppress_tokens=[],
            begin_suppress_tokens=[],
        )
    )  # fmt: skip


def bamba():
    """Mamba-2 blocks and one of attention with grouped queries."""
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(
            vocab_size=66, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8,
            mamba_expand=2, mamba_chunk_size=8, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def batch(model: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(3, 66, (4, 10), generator=g)
    labels[0, 5:] = labels[2, 7:] = -100
    ids = torch.randint(3, 66, (4, 14), generator=g)
    return {
        "t5": {"input_ids": ids, "labels": labels},
        "vit": {
            "pixel_values": torch.randn(4, 3, 12, 12, generator=g, dtype=torch.float64),
            "labels": torch.randint(0, 6, (4,), generator=g),
        },
        "whisper": {"input_features": torch.randn(4, 8, 20, generator=g, dtype=torch.float64), "labels": labels},
        "bamba": {"input_ids": ids, "labels": ids},
    }[model]


# T5 squares in float32 in its norm, Bamba scans in float32, whatever the parameters' dtype: sums in another order differ by that.
@pytest.mark.parametrize(
    ("factory", "tolerance"),
    [(t5, 1e-5), (vit, 1e-9), (whisper, 1e-9), (bamba, 1e-5)],
    ids=["t5", "vit", "whisper", "bamba"],
)
def test_exact_under_tp_and_fsdp(pool, factory, tolerance):
    inputs, mesh = batch(factory.__name__), {"tp": 2, "dp_shard": 2}
    with torch.device("meta"):
        model = factory().double()
    found = derive(model, mesh, inputs, seconds=2.0)
    assert not found.refused, [str(e) for e in found.refused]
    receipt = mp.verify(factory, found.plan, nproc=4, inputs=inputs, steps=2, rtol=tolerance)
    assert receipt.passed, str(receipt)
    matrices = sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() > 1)
    assert sum(n for _, n in found.whole) <= 0.1 * matrices, found.plan.note
