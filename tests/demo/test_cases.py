"""What the demo trains is what it says: the models, their plans, and nobody's code but transformers' own."""

import json

import torch

import meshplan as mp
from meshplan.demo.cases import MESH, WORLD, demo_llama, hf_llama, own_llama
from meshplan.models.registry import resolve_model


def test_the_own_llama_has_grouped_queries_swiglu_and_rms_norms():
    model = demo_llama()
    # Embedding and head 2 x 256 x 128; a block: q and o 128 x 128, k and v 64 x 128, three of 352 x 128, two norms.
    block = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128 + 2 * 128
    assert sum(p.numel() for p in model.parameters()) == 2 * 256 * 128 + 4 * block + 128
    assert {type(m).__name__ for m in model.modules()} >= {"RMSNorm", "Rotary", "FeedForward"}


def test_the_own_case_is_the_shipped_plan_with_another_mesh_and_batch():
    case, shipped = own_llama(), mp.load_plan("llama3/tp_sp_fsdp")
    assert case.plan.rules == shipped.rules
    assert case.plan.fsdp == shipped.fsdp
    assert case.plan.mesh == MESH
    assert case.plan.inputs["tokens"].place == shipped.inputs["tokens"].place
    assert resolve_model(case.model) is demo_llama


def test_the_transformers_case_is_its_own_class_under_its_own_table(tmp_path):
    case = hf_llama(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    with torch.device("meta"):
        model = resolve_model(case.model)()
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert {rule.at for rule in case.plan.rules} == set(model._tp_plan)
    assert case.plan.fsdp.units == ("model.layers.*",)
    low = mp.lower(model, case.plan, WORLD)
    layouts = {p["name"]: p["layout"]["tp"] for p in low.placements}
    assert layouts["model.layers.1.self_attn.q_proj.weight"] == "S(0)"
    assert layouts["model.layers.1.mlp.down_proj.weight"] == "S(1)"
    # It shifts the labels by itself, so it is given the tokens twice.
    batch = next(case.batches(1, 0))
    assert torch.equal(batch["input_ids"], batch["labels"])
