"""transformers' Mixtral beside the plan that a person writes for it: attention, embedding, head, and every expert cut within."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import meshplan as mp
from meshplan.cost.machine import Machine
from meshplan.search.auto import derive
from tests.search.test_auto import seconds, shards

transformers = pytest.importorskip("transformers")
MESH = {"dp_shard": 2, "tp": 4}
FFN = 3584


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=FFN, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm")


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.empty(4, 2048, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


@cache
def found():
    return derive(mixtral(), MESH, inputs())


def by_hand() -> mp.Plan:
    experts = {"gate_up_proj": {"tp": mp.S(1, [FFN, FFN])}, "down_proj": {"tp": mp.S(2)}}
    placed = {k: mp.Input(tuple(t.shape), t.dtype, {"dp": mp.S(0)}) for k, t in inputs().items()}
    return mp.Plan(
        mesh=MESH, inputs=placed, fsdp=mp.Fsdp(units=["model.layers.*"]),
        rules=[
            mp.Rule("model.embed_tokens", use="embedding"),
            mp.Rule("model.layers.*.self_attn.{q_proj,k_proj,v_proj}", use="colwise"),
            mp.Rule("model.layers.*.self_attn.o_proj", use="rowwise"),
            mp.Rule("model.layers.*.mlp.experts", params=experts),
            mp.Rule("lm_head", use="vocab_head"),
        ],
    )  # fmt: skip


def test_what_a_person_writes_costs_no_less():
    theirs = mp.lower(mixtral(), by_hand(), 8, inputs=inputs())
    wire = [sum(c.to_json()["wire_bytes"] for c in low.collectives) for low in (found().lowered, theirs)]
    assert wire[0] <= wire[1]
    assert found().choice.gap <= 1e-3
    # Sequences are cut, for less work between the blocks: more collectives, hence more latency, of fewer bytes.
    assert seconds(found().lowered, Machine(), MESH) <= 1.1 * seconds(theirs, Machine(), MESH)


def test_the_dense_parts_are_split_as_megatron_splits_them():
    want = {"q_proj": "S(0)", "k_proj": "S(0)", "v_proj": "S(0)", "o_proj": "S(1)", "lm_head": "S(0)"}
    layout = {name: place for name, place in shards(found().lowered).items() if name.split(".")[-2] in want}
    assert len(layout) == 3 * 4 + 1
    assert layout == {name: want[name.split(".")[-2]] for name in layout}


def test_experts_are_cut_within_so_that_none_is_whole_on_a_rank():
    layout = {name: place for name, place in shards(found().lowered).items() if ".experts." in name}
    assert len(layout) == 6
    assert {name.rpartition(".")[2]: place for name, place in layout.items()} == {
        "gate_up_proj": f"S(1, parts=[{FFN}, {FFN}])", "down_proj": "S(2)",
    }  # fmt: skip
