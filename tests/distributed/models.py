"""The models and plans of the exactness matrix: small, with odd sizes where a layout lets them be odd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import meshplan as mp
from meshplan.models.gpt import GPT, GPTConfig
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.verify.job import MakeOptimizer
from meshplan.verify.receipt import Receipt

S = mp.S
BATCH, SEQ, VOCAB = 8, 12, 127

MESHES: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2},
    "tp4": {"tp": 4},
    "ddp4": {"dp_replicate": 4},
    "zero1": {"dp_shard": 4},
    "zero2": {"dp_shard": 4},
    "dp_shard4": {"dp_shard": 4},
    "dp_replicate2 x dp_shard2": {"dp_replicate": 2, "dp_shard": 2},
    "dp_shard2 x tp2+sp": {"dp_shard": 2, "tp": 2},
}
"""Every composition of the matrix; `+sp` adds sequence parallelism, `zero1` and `zero2` name the FSDP strategy."""


@dataclass(frozen=True)
class Family:
    """A model and how it is laid out.

    Attributes:
        factory: builds it; importable, and takes keyword arguments that change its configuration.
        rules: the tensor-parallel rules, with sequence parallelism or without.
        tokens: name of the token input.
        units: modules that are FSDP and recompute units.
        rtol: the largest relative error: rounding in float64, or in float32 for models that compute parts in it.
        optimizer: what takes the steps after which parameters are compared; None is AdamW. It divides a gradient by its
            own size, so where rounding is float32's, parameters whose gradient is nearly zero tell nothing under it.
    """

    factory: Callable[..., nn.Module]
    rules: Callable[[bool], list[mp.Rule]]
    tokens: str
    units: str
    rtol: float
    optimizer: MakeOptimizer | None = None

    def plan(self, composition: str, *, recompute: bool = False) -> mp.Plan:
        """The plan of one entry of `MESHES`."""
        mesh, sp = MESHES[composition], composition.endswith("+sp")
        strategy = composition if composition.startswith("zero") else "zero3"
        place = {"dp": S(0)} if {"dp_shard", "dp_replicate"} & set(mesh) else {}
        return mp.Plan(
            mesh=mesh,
            inputs={
                name: mp.Input(shape=(BATCH, SEQ), dtype=torch.int64, place=place) for name in (self.tokens, "labels")
            },
            rules=self.rules(sp) if "tp" in mesh else [],
            fsdp=mp.Fsdp(units=[self.units], strategy=strategy) if "dp_shard" in mesh else None,
            recompute=mp.Recompute(units=[self.units]) if recompute else None,
        )

    def model(self, **changes: Any) -> Callable[[], nn.Module]:
        """A factory of this model with a changed configuration, that ranks can import."""
        return functools.partial(self.factory, **changes)

    def verify(self, plan: mp.Plan, **changes: Any) -> Receipt:
        """The receipt of `plan` for this model, at the family's own tolerance."""
        return mp.verify(self.model(**changes), plan, nproc=world_of(plan), rtol=self.rtol, optimizer=self.optimizer)


def world_of(plan: mp.Plan) -> int:
    """Ranks of a plan whose degrees are all written out."""
    return math.prod(plan.mesh.values())


def llama(**changes: Any) -> Llama:
    """Grouped-query Llama: 4 heads on 2 kv heads, vocabulary 127."""
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCAB, "ffn_dim": 44}
    return Llama(LlamaConfig(**{**sizes, **changes}))


def llama_rules(sp: bool) -> list[mp.Rule]:
    """Column, row and vocabulary splits of Llama; with `sp`, the residual stream is split along the sequence."""
    out: dict[str, Any] = {"output": {"tp": S(1)}} if sp else {}
    rules = [
        mp.Rule("tok_embeddings", use="embedding", **out),
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", **out),
        mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
        mp.Rule("layers.*.feed_forward.w2", use="rowwise", **out),
        mp.Rule("output", use="vocab_head"),
    ]
    norms = [mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"), mp.Rule("norm", use="sequence")]
    return rules + norms if sp else rules


def gpt(**changes: Any) -> GPT:
    """GPT-2 with a fused q|k|v Linear, biases, learned positions and a tied head."""
    sizes = {"n_embd": 40, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "block_size": 17}
    return GPT(GPTConfig(**{**sizes, **changes}))


def gpt_rules(sp: bool) -> list[mp.Rule]:
    """As for Llama, with q|k|v split part by part."""
    out: dict[str, Any] = {"output": {"tp": S(1)}} if sp else {}
    fused = {"tp": S(0, parts=(40, 40, 40))}
    rules = [
        mp.Rule("wte", use="embedding", **out),
        mp.Rule("h.*.attn.c_attn", params={"weight": fused, "bias": fused}),
        mp.Rule("h.*.attn.c_proj", use="rowwise", **out),
        mp.Rule("h.*.mlp.c_fc", use="colwise"),
        mp.Rule("h.*.mlp.c_proj", use="rowwise", **out),
        mp.Rule("lm_head", use="vocab_head"),
    ]
    if sp:
        rules += [
            mp.Rule("wpe", output={"tp": S(0)}),
            mp.Rule("h.*.{ln_1,ln_2}", use="sequence"),
            mp.Rule("ln_f", use="sequence"),
        ]
    return rules


def hf(kind: str, **changes: Any) -> nn.Module:
    """A transformers causal language model of 2 layers from its configuration: `llama`, `qwen3`, `gemma2` or `gpt2`."""
    import transformers as hf

    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 17}
        config: Any = hf.GPT2Config(vocab_size=VOCAB, use_cache=False, **{**sizes, **_GPT2_PLAIN, **changes})
        return hf.GPT2LMHeadModel(config)
    sizes = {
        "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 32, "vocab_size": VOCAB,
        "use_cache": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "attention_dropout": 0.0,
    }  # fmt: skip
    # A window below the sequence length, so that Gemma's two kinds of layers differ.
    own = {"sliding_window": 5, "query_pre_attn_scalar": 10} if kind == "gemma2" else {}
    name = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma2"}[kind]
    config = getattr(hf, f"{name}Config")(**{**sizes, **own, **changes})
    return getattr(hf, f"{name}ForCausalLM")(config)


_GPT2_PLAIN = {
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def hf_rules(sp: bool) -> list[mp.Rule]:
    """For the models of transformers that are written like Llama."""
    out: dict[str, Any] = {"output": {"tp": S(1)}} if sp else {}
    rules = [
        mp.Rule("model.embed_tokens", use="embedding", **out),
        mp.Rule("model.layers.*.self_attn.{q,k,v}_proj", use="colwise"),
        mp.Rule("model.layers.*.self_attn.o_proj", use="rowwise", **out),
        mp.Rule("model.layers.*.mlp.{gate,up}_proj", use="colwise"),
        mp.Rule("model.layers.*.mlp.down_proj", use="rowwise", **out),
        mp.Rule("lm_head", use="vocab_head"),
    ]
    if sp:
        rules += [mp.Rule("model.layers.*.*_layernorm", use="sequence"), mp.Rule("model.norm", use="sequence")]
    return rules


def hf_gpt2_rules(sp: bool) -> list[mp.Rule]:
    """transformers' GPT-2 keeps its weights as [in, out], q|k|v in one of them."""
    out: dict[str, Any] = {"output": {"tp": S(1)}} if sp else {}
    at = "transformer.h.*"
    rules = [
        mp.Rule("transformer.wte", use="embedding", **out),
        mp.Rule(
            f"{at}.attn.c_attn",
            params={"weight": {"tp": S(1, parts=(40, 40, 40))}, "bias": {"tp": S(0, parts=(40, 40, 40))}},
        ),
        mp.Rule(f"{at}.attn.c_proj", use="rowwise", **out),
        mp.Rule(f"{at}.mlp.c_fc", use="colwise"),
        mp.Rule(f"{at}.mlp.c_proj", use="rowwise", **out),
        mp.Rule("lm_head", use="vocab_head"),
    ]
    if sp:
        rules += [
            mp.Rule("transformer.wpe", output={"tp": S(1)}),
            mp.Rule(f"{at}.{{ln_1,ln_2}}", use="sequence"),
            mp.Rule("transformer.ln_f", use="sequence"),
        ]
    return rules


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent: its steps are as far apart as the gradients are."""
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def _hf_family(kind: str, rules: Callable[[bool], list[mp.Rule]], units: str) -> Family:
    return Family(functools.partial(hf, kind), rules, "input_ids", units, 2e-6, sgd)


FAMILIES: dict[str, Family] = {
    "llama": Family(llama, llama_rules, "tokens", "layers.*", 1e-9),
    "gpt": Family(gpt, gpt_rules, "tokens", "h.*", 1e-9),
    "hf-llama": _hf_family("llama", hf_rules, "model.layers.*"),
    "hf-qwen3": _hf_family("qwen3", hf_rules, "model.layers.*"),
    "hf-gemma2": _hf_family("gemma2", hf_rules, "model.layers.*"),
    "hf-gpt2": _hf_family("gpt2", hf_gpt2_rules, "transformer.h.*"),
}
