"""What the demo trains: a model, the plan that shards it, and which text goes into which of its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshplan.models.llama import Llama, LlamaConfig
from meshplan.models.registry import resolve_model
from meshplan.models.text import batches
from meshplan.plan.placements import S
from meshplan.plan.plan import Plan
from meshplan.plan.rules import Input
from meshplan.plan.yaml_io import load_plan

MESH = {"dp_shard": 2, "tp": 2}
WORLD = 4
BATCH, SEQ_LEN = 8, 128
DEMO_PLAN = "llama3/tp_sp_fsdp"

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": False,
}
"""A transformers Llama of 0.5 M parameters, as its `config.json`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to train.

    Attributes:
        name: also the folder of its files.
        title: what it is, in words.
        model: a name that `resolve_model` understands.
        plan: for `WORLD` ranks, with the inputs below.
        feed: which of the text's `tokens` and `labels` goes into which input; all are int64 `[BATCH, SEQ_LEN]`.
        steps: share of the steps asked for.
        rtol: largest relative error of the verification, in float64.
    """

    name: str
    title: str
    model: str
    plan: Plan
    feed: Mapping[str, str]
    steps: float
    rtol: float

    def batches(self, steps: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Global batches by input name; the same ones for the same arguments."""
        for text in batches(SEQ_LEN, BATCH, steps, seed):
            yield {name: text[part] for name, part in self.feed.items()}


def demo_llama() -> Llama:
    """A byte-level Llama of 0.8 M parameters: 4 blocks in which 8 query heads share 4 kv heads."""
    return Llama(LlamaConfig(dim=128, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=352, vocab_size=256))


def own_llama() -> Case:
    """The plain Llama of this package under the plan shipped for it, with the mesh and the inputs of the demo."""
    feed = {"tokens": "tokens", "labels": "labels"}
    return Case(
        name="llama",
        title="plain PyTorch Llama, shipped plan " + DEMO_PLAN,
        model="meshplan.demo.cases:demo_llama",
        plan=replace(load_plan(DEMO_PLAN), mesh=MESH, inputs=_inputs(feed)),
        feed=feed,
        steps=1.0,
        rtol=1e-9,
    )


def hf_llama(folder: Path) -> Case:
    """transformers' `LlamaForCausalLM`, unmodified, under the tensor-parallel table it carries and FSDP.

    Writes `config.json` into `folder`, which must exist. It shifts the labels itself, so they are the tokens. Raises
    PlanError `bad-model` where transformers is not installed.
    """
    file = (folder / "config.json").absolute()
    file.write_text(json.dumps(HF_CONFIG, indent=2) + "\n", encoding="utf-8")
    model = f"hf:{file}"
    feed = {"input_ids": "tokens", "labels": "tokens"}
    with torch.device("meta"):
        built = resolve_model(model)()
    plan = Plan.from_tp_plan(built, mesh=MESH, inputs=_inputs(feed), fsdp={"units": ["model.layers.*"]})
    return Case(
        name="hf",
        title="transformers LlamaForCausalLM, plan from its own table",
        model=model,
        plan=plan,
        feed=feed,
        steps=1 / 3,
        rtol=2e-6,  # it computes its loss and rotary tables in float32, whatever the parameters' dtype
    )


def _inputs(feed: Mapping[str, str]) -> dict[str, Input]:
    return {name: Input(shape=(BATCH, SEQ_LEN), dtype=torch.int64, place={"dp": S(0)}) for name in feed}
