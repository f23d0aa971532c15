"""Shrinking: small sizes, the same head counts, the same divisibility, and a model that still builds."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.models.llama import LlamaConfig
from meshplan.verify.shrink import shrink_config, shrunk


def test_a_large_llama_keeps_its_heads_and_ratios():
    big = LlamaConfig(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53248, vocab_size=128256, tied=True)
    small = shrink_config(big)
    assert (small.n_heads, small.n_kv_heads, small.tied) == (128, 8, True)
    assert small.dim == 128 * 8
    assert small.ffn_dim == 53248 // 16  # heads were 128 wide and are 8
    assert (small.n_layers, small.vocab_size) == (2, 256)
    assert big.n_layers == 126  # the original is untouched


def test_awkward_sizes_stay_as_awkward_as_they_were():
    small = shrink_config(LlamaConfig(dim=1600, n_layers=48, n_heads=25, n_kv_heads=25, ffn_dim=4260, vocab_size=50257))
    assert small.dim == 25 * 8  # heads were 64 wide
    assert small.ffn_dim == 536  # 532.5 rounded up to a multiple of gcd(4260, 16) = 4
    assert small.vocab_size == 256 + 50257 % 256 == 337  # odd, as 50257 is


def test_a_small_model_keeps_its_widths():
    config = LlamaConfig(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=176, vocab_size=256)
    assert shrink_config(config) == config


@dataclass(frozen=True)
class Hybrid:
    hidden_size: int = 512
    num_attention_heads: int = 8
    head_dim: int = 128
    qk_rope_head_dim: int = 32
    num_hidden_layers: int = 24
    layer_types: tuple[str, ...] = ("mamba",) * 5 + ("attention",) + ("mamba",) * 18
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    vocab_size: int = 1000
    pad_token_id: int = 999
    bos_token_id: int = 1
    use_cache: bool = True


def test_enough_layers_remain_to_show_each_type_and_ids_stay_in_the_vocabulary():
    small = shrink_config(Hybrid())
    assert (small.num_hidden_layers, small.layer_types) == (6, ("mamba",) * 5 + ("attention",))
    assert (small.head_dim, small.qk_rope_head_dim) == (8, 2)
    assert (small.hidden_size, small.moe_intermediate_size) == (32, 96)  # 88 rounded up to a multiple of 16
    assert (small.n_routed_experts, small.num_experts_per_tok) == (16, 8)
    assert (small.vocab_size, small.pad_token_id, small.bos_token_id) == (488, 487, 1)
    assert small.use_cache is True


def test_a_transformers_configuration():
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    big = HFConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, head_dim=128)
    small = shrink_config(big)
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (512, 64, 8, 8)
    assert small.intermediate_size == 11008 // 16
    with torch.device("meta"):
        model = LlamaForCausalLM(small)
    assert model.model.layers[1].self_attn.k_proj.weight.shape == (64, 512)


def test_a_shrunk_factory_travels_and_builds_the_same_class():
    factory = pickle.loads(pickle.dumps(shrunk("llama3-8b")))
    model = factory()
    assert type(model).__name__ == "Llama"
    assert len(model.layers) == 2
    assert model.layers[0].attention.wk.weight.shape == (8 * 8, 32 * 8)
    assert not model.output.weight.is_meta


def _plain() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_model_without_a_configuration_is_refused():
    with pytest.raises(PlanError, match="Linear has no `config`") as caught:
        shrunk(_plain)
    assert caught.value.code == "cannot-shrink"


@dataclass(frozen=True)
class Headless:
    hidden_size: int = 512


def test_a_configuration_without_heads_is_refused():
    with pytest.raises(PlanError, match="Headless has no number of heads") as caught:
        shrink_config(Headless())
    assert caught.value.code == "cannot-shrink"
