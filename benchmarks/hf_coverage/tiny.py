"""A tiny model of every causal language model class of transformers, its sizes derived from the names of its config's fields.

Nothing here knows a model: a field is shrunk by what its name says it counts. `overrides.py` holds what names do not say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.hf_coverage.overrides import BATCHES, EVALUATED, FLOAT32, NEEDED, OVERRIDES, PADDED, PADS, PARTS
from meshplan.mesh.streams import stream_key

BATCH, SEQ, VOCAB = 4, 14, 131
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
HIDDEN = HEADS * HEAD_DIM

# (pattern of the whole field name, size). The first that matches counts; a field whose own value is smaller keeps it.
SIZES: tuple[tuple[str, Any], ...] = (
    (r".*token_id|.*token_index|.*_index|.*_id|seed|_.*", None),
    (r".*(dropout|pdrop|drop_rate|layerdrop|jitter_noise|dropout_prob).*", 0.0),
    (r"(decoder_|.*_)?vocab_size(_per_layer_input)?|unpadded_vocab_size|.*group_vocab", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|model_max_length|context_length", 64),
    (r"(num_|n_)?(decoder_|hidden_|encoder_)?(layers?|blocks)|n_layer|num_layers", None),
    (r"num_key_value_heads|kv_n_heads|num_kv_heads|swa_num_key_value_heads", KV_HEADS),
    (r"(swa_)?num_(decoder_|encoder_)?attention_heads|(decoder_|encoder_)?attention_heads|n_heads?|num_heads", HEADS),
    (r"linear_num_heads|linear_num_value_heads|index_n_heads|mamba_n_heads|mamba_num_heads", HEADS),
    (r"linear_num_key_heads|mamba_n_groups|mamba_ngroups|n_groups", KV_HEADS),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r".*head_?dim|d_head|d_kv|dim_head|attention_head_size|kv_channels|mamba_d_head", HEAD_DIM),
    (r"hidden_size|d_model|n_embd|dim_model|emb_dim|embedding_dim|embedding_size|hidden_size_global", HIDDEN),
    (r"(attention_hidden_size|lru_width|word_embed_proj_dim|input_embedding_size|output_embedding_size)", HIDDEN),
    (r"moe_.*intermediate_size|expert_ffn_hidden_size|shared_.*intermediate_size", 40),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_inner|n_inner|dff|dim_ff|feed_forward_size).*", 88),
    (r"n_routed_experts|num_local_experts|(moe_)?num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"q_lora_rank", 40),
    (r".*_rank", 24),
    (r"(ssm_)?state_size|mamba_d_state", 8),
    (r".*chunk_size|.*chunk_length|block_size|index_topk|window_size|.*sliding_window(_size)?|local_attention|"
     r"attention_window_size|keep_window_size", 8),
)  # fmt: skip
UNSET = ("num_key_value_heads", "head_dim", "n_routed_experts", "num_experts_per_tok")
"""Fields that a config may leave open though its model cannot do without."""
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)


def model_types() -> list[str]:
    """Every config with a causal language model class, in transformers' own order."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of `model_type` with few, narrow layers: one of each kind of layer that its defaults have, at least two."""
    overrides = OVERRIDES.get(model_type, {})
    cls = CONFIG_MAPPING[model_type]
    config = cls(**shrunk(cls, overrides))
    config.use_cache = False
    return config


def shrunk(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a small `cls`; `overrides` win, and hold those of nested configs as dicts."""
    given = {k: v for k, v in overrides.items() if not isinstance(v, dict)}
    default = cls(**NEEDED.get(cls.model_type, {}))
    made: dict[str, Any] = dict(_layers(default))
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            made[name] = shrunk(type(value), overrides.get(name, {}))
        elif name not in made and not isinstance(value, bool) and (isinstance(value, int | float) or name in UNSET):
            size = _size(name, value)
            if size is not None:
                made[name] = size
    ids: dict[str, int | None] = {name: 1 for name in vars(default) if name in ("bos_token_id", "eos_token_id")}
    if "pad_token_id" in vars(default):
        ids["pad_token_id"] = 1 if cls.model_type in PADDED | PADS else None
    return made | _fitted(made) | NEEDED.get(cls.model_type, {}) | ids | given


def _fitted(made: dict[str, Any]) -> dict[str, Any]:
    """Sizes that follow from others: latent attention has a key head a query head, state-space heads fill their width."""
    fitted: dict[str, Any] = {}
    if "kv_lora_rank" in made:
        fitted |= {"num_key_value_heads": HEADS, "qk_head_dim": 24}
        if "head_dim" in made:
            fitted["head_dim"] = made["qk_rope_head_dim"]
    wide = 2 * HIDDEN
    for heads, size in (
        ("mamba_n_heads", "mamba_d_head"),
        ("num_heads", "head_dim"),
        ("mamba_num_heads", "mamba_head_dim"),
    ):
        if heads in made and size in made and (heads != "num_heads" or "state_size" in made):
            fitted[size] = wide // made[heads]
    if "mamba_d_ssm" in made:
        fitted["mamba_d_ssm"] = wide
    return {k: v for k, v in fitted.items() if k in made}


def _size(name: str, value: float | None) -> Any:
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            if size is None or (size and value is not None and value <= size):
                return None
            return type(value)(size) if value is not None else size
    return None


def _layers(default: PreTrainedConfig) -> dict[str, Any]:
    """The number of layers, and every list that has an entry a layer, cut to the first layer of each kind."""
    name = next((n for n in LAYERS if isinstance(getattr(default, n, None), int)), None)
    if name is None:
        return {}
    count = getattr(default, name)
    lists = {
        k: list(v) for k, v in vars(default).items() if isinstance(v, list | tuple) and len(v) == count and count > 1
    }
    kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * count
    first = [i for i, kind in enumerate(kinds) if kinds.index(kind) == i][:4]
    while len(first) < min(2, count):
        first.append(next(i for i in range(count) if i not in first))
    first.sort()
    made: dict[str, Any] = {k: [v[i] for i in first] for k, v in lists.items()}
    others = [n for n in vars(default) if n in (*LAYERS, "encoder_layers", "num_encoder_layers")]
    return made | {n: len(first) for n in others if isinstance(getattr(default, n), int)}


def dtype_of(model_type: str) -> torch.dtype:
    return torch.float32 if model_type in FLOAT32 else torch.float64


def tiny_model(model_type: str, attention: str = "eager") -> nn.Module:
    """The class's tiny model with every parameter random, in training mode where that is a function."""
    torch.manual_seed(0)
    dtype = dtype_of(model_type)
    config = tiny_config(model_type)
    # A dense product an expert and token: the other implementations take no float64, or read the routing on the host.
    how = {"attn_implementation": attention, "experts_implementation": "batched_mm", "dtype": dtype}
    if model_type not in PARTS:
        model = AutoModelForCausalLM.from_config(config, **how)
    else:
        part = getattr(config, PARTS[model_type])
        model = getattr(transformers, class_name(model_type))._from_config(part, **how)
    model = model.to(dtype).train(model_type not in EVALUATED)
    for held in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        if held.model_type not in PADS:
            vars(held)["pad_token_id"] = None
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(stream_key(0, "tiny", name))
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            # Zeros and ones hide errors: gates and norms get their own spread around what they were.
            p.add_(noise, alpha=0.1 if p.dim() == 1 else 0.05)
    return model


class _Lifted:
    """torch as a model's code may see it, where float32 means float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def lifted_model(model_type: str) -> nn.Module:
    """The tiny model whose own casts to float32 go to float64, from here on in this process: nothing hides in rounding."""
    tiny_model(model_type)  # its code is loaded now
    lift()
    return tiny_model(model_type).double()


def lift(back: bool = False) -> None:
    """Make `torch.float32` and `.float()` mean float64 in all code of transformers that is loaded, or (`back`) undo it."""
    torch.Tensor.float = _FLOAT if back else torch.Tensor.double  # type: ignore[method-assign,assignment]
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and isinstance(vars(module).get("torch"), type(torch) | _Lifted):
            module.torch = torch if back else _Lifted()  # type: ignore[attr-defined]


@contextmanager
def lifted() -> Iterator[None]:
    """`lift` for a while."""
    lift()
    try:
        yield
    finally:
        lift(back=True)


_FLOAT = torch.Tensor.float


def tiny_batch(model_type: str) -> dict[str, torch.Tensor]:
    """Global ids and labels [4, 14], with labels ignored unevenly."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100, (BATCH, SEQ), generator=generator)
    labels = torch.randint(3, 100, (BATCH, SEQ), generator=generator)
    for row, ignored in enumerate((1, 3, 9, 6)):
        labels[row, :ignored] = -100
    return {"input_ids": ids, "labels": labels} | BATCHES.get(model_type, {})
