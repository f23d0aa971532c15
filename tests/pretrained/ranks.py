"""What each gloo rank does for the tests of this folder, and the small transformers models that they save."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshplan as mp
from meshplan.runtime.extents import local_part
from tests.distributed.models import FAMILIES, hf
from tests.distributed.training import full

FIELDS = {"llama": {"tie_word_embeddings": True}, "gpt2": {}, "qwen3": {"num_attention_heads": 8}}
BATCH = {"input_ids": torch.arange(96).reshape(8, 12) % 127, "labels": torch.arange(5, 101).reshape(8, 12) % 127}


def saved(kind: str, folder: Any, **options: Any) -> nn.Module:
    """A model of `kind` with values of its own, saved to `folder` in float32 by transformers."""
    torch.manual_seed(3)
    model = hf(kind, **FIELDS[kind])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    model.save_pretrained(folder, **options)
    return model.eval()


def plan_of(kind: str, composition: str) -> mp.Plan:
    return FAMILIES[f"hf-{kind}"].plan(composition)


def loaded(folder: str, kind: str, composition: str, dtype: torch.dtype | str = "auto") -> dict[str, Any]:
    """What a rank has after `from_pretrained`: full tensors, its loss, and bytes read, held and of the whole model."""
    counted: list[int] = []
    from meshplan.pretrained import build

    plain = build.load_pretrained
    build.load_pretrained = lambda *a, **k: counted.append(plain(*a, **k).bytes_read)
    try:
        model = mp.from_pretrained(folder, plan_of(kind, composition), dtype=dtype)
    finally:
        build.load_pretrained = plain
    state = model.state_dict()
    parameters = dict(model.named_parameters()).values()
    return {
        "state": {name: full(t) for name, t in state.items()},
        "loss": model(**mp.shard_batch(model, BATCH)).loss.item(),
        "read": counted[0],
        "held": sum(local_part(p).numel() for p in parameters),
        "whole": sum(p.numel() for p in parameters),
        "training": model.training,
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


def resaved(folder: str, out: str, kind: str, composition: str) -> None:
    """Load, take one step, and save the whole again; rank 0 also writes what it did not need ranks for."""
    model = mp.from_pretrained(folder, plan_of(kind, composition), dtype=torch.float64).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**mp.shard_batch(model, BATCH)).loss.backward()
    optimizer.step()
    mp.save_pretrained(model, out)


def refused(folder: str, kind: str, composition: str, drop: str | None = None) -> tuple[str, str]:
    """Code and message that this rank's `load_pretrained` ends with, and whether a value changed is an error."""
    model = mp.parallelize(hf(kind, **FIELDS[kind]), plan_of(kind, composition))
    before = {name: local_part(p).clone() for name, p in model.named_parameters()}
    if drop and dist.get_rank() == 1:  # one rank sees another folder
        folder = drop
    try:
        mp.load_pretrained(model, folder)
    except mp.PlanError as error:
        assert all(torch.equal(local_part(p), before[name]) for name, p in model.named_parameters())
        return error.code, str(error)
    return "", ""


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=31, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=3, num_local_experts=5, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def experts(folder: str) -> tuple[dict[str, Tensor], int, int]:
    """Packed experts under FSDP2 alone: full tensors, bytes read, bytes of the model."""
    model = mixtral()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = mp.load_pretrained(model, folder)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return {name: full(t) for name, t in model.state_dict().items()}, report.bytes_read, whole


def names_in(file: Any) -> list[str]:
    with safe_open(file, "pt") as handle:
        return list(handle.keys())
