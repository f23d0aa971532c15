"""The shipped plans parse, and every rule and unit names modules that the model it is for has."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshplan as mp
from meshplan.models.registry import resolve_model
from meshplan.plan.patterns import match
from meshplan.plan.placements import Shard
from meshplan.plan.yaml_io import load_plan

FOLDER = Path(__file__).parents[2] / "plans"
MODEL_OF = {
    "llama3": "llama-tiny", "gpt": "gpt-tiny", "deepseek_v3": "deepseek-tiny", "qwen3_moe": "qwen3-moe-tiny",
    "mixtral": "mixtral-tiny", "gpt_oss": "gpt-oss-tiny",
}  # fmt: skip
NAMES = ["ddp", "fsdp", "hsdp", "tp", "tp_sp", "tp_sp_fsdp", "zero1", "zero2"]
LONG = ["llama3/cp_fsdp", "llama3/cp_tp_sp_fsdp"]
EXPERTS = [*(f"{family}/ep_fsdp" for family in ("deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss")), "qwen3_moe/ep_tp_sp_fsdp"]
PLANS = [*(f"{family}/{name}" for family in ("llama3", "gpt") for name in NAMES), *LONG, *EXPERTS]


def test_the_folder_holds_these_plans_and_no_others():
    assert sorted(f"{p.parent.name}/{p.stem}" for p in FOLDER.glob("*/*.yaml")) == sorted(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_rules_units_and_inputs_fit_the_model(name):
    plan = load_plan(FOLDER / f"{name}.yaml")
    with torch.device("meta"):
        model = resolve_model(MODEL_OF[name.split("/")[0]])()
    modules = dict(model.named_modules())
    for rule in plan.rules:
        hits = [path for path in modules if match(rule.at, (path,))]
        assert hits, rule.at
        for path in hits:
            shapes = {key: p.shape for key, p in modules[path].named_parameters()}
            for key, layout in rule.params.items():
                for placement in layout.values():
                    if isinstance(placement, Shard) and placement.parts:
                        assert sum(placement.parts) == shapes[key][placement.dim]
                    else:
                        assert key in shapes
    units = plan.fsdp.units if plan.fsdp else ()
    for unit in units:
        assert [path for path in modules if match(unit, (path,))], unit
    positions = getattr(model, "wpe", None)
    for key, item in plan.inputs.items():
        assert key in ("tokens", "labels")
        assert positions is None or item.shape[1] <= positions.num_embeddings


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_lower_without_a_gathered_activation(name):
    plan = load_plan(FOLDER / f"{name}.yaml")
    with torch.device("meta"):
        model = resolve_model("llama-tiny")()
    low = mp.lower(model, plan, 16)
    assert {c.op for c in low.collectives if c.axis == "cp"} == {"send", "recv"}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_the_tiny_models_are_exact_on_ranks_under_the_shipped_plans(name, pool):
    """With experts over 2 of 4 ranks, and a batch of unequal labels."""
    plan = load_plan(FOLDER / f"{name}.yaml")
    small = replace(plan, experts=replace(plan.experts, ep=2))
    tokens = torch.arange(4 * 6).view(4, 6) * 7 % 251
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(6) < torch.arange(4)[:, None], -100)
    receipt = mp.verify(
        resolve_model(MODEL_OF[name.split("/")[0]]), small, nproc=4, inputs={"tokens": tokens, "labels": labels}, steps=2
    )
    assert receipt.passed, str(receipt)
