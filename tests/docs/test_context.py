"""docs/context.md tells the truth: its plan lowers, its formulas are what is counted, its functions are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import meshplan as mp
from meshplan.cli.main import app
from meshplan.models.registry import resolve_model
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.dynamic import plan_samples
from meshplan.ops.attention.dynamic_report import report
from meshplan.ops.attention.dynamic_run import run_dynamic

PAGE = Path(__file__).parents[2] / "docs" / "context.md"


def plan(**context: object) -> mp.Plan:
    text = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert text
    found = mp.Plan.from_yaml(text[1]).to_dict()
    found["mesh"]["dp_shard"] = 1
    return mp.Plan.from_dict(found | {"context": found["context"] | context})


@pytest.mark.parametrize(
    ("context", "forward", "backward"),
    [
        ({}, lambda n, s, q, k, d: (n - 1) * 2 * s * k * d / n, lambda f: 2 * f),
        ({"transport": "peer"}, lambda n, s, q, k, d: (n - 1) * 2 * s * k * d / n, lambda f: 2 * f),
        ({"method": "allgather"}, lambda n, s, q, k, d: (n - 1) * 2 * s * k * d / n, lambda f: 2 * f),
        ({"method": "ulysses"}, lambda n, s, q, k, d: (n - 1) / n * s * (2 * q + 2 * k) * d / n, lambda f: f),
    ],
    ids=["ring", "ring of peers", "allgather", "ulysses"],
)
def test_bytes_are_those_of_the_table(context, forward, backward):
    with torch.device("meta"):
        model = resolve_model("llama-tiny")()
    low = mp.lower(model, plan(**context), 4)
    config = model.config
    sent = {"forward": 0, "backward": 0}
    for c in low.to_json()["collectives"]:
        if c["module"] == "layers.0.attention":
            sent[c["phase"]] += c["wire_bytes"] * c["count"]
    rows, length = plan().inputs["tokens"].shape
    expected = 4 * rows * forward(4, length, config.n_heads, config.n_kv_heads, config.dim // config.n_heads)
    assert sent == {"forward": expected, "backward": backward(expected)}


def test_the_quoted_table_is_what_the_command_prints():
    command, shown = re.findall(r"```(?:bash|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.stdout == shown


def test_what_the_page_names_is_there():
    schedule = plan_samples([64, 4, 4, 8], 4, max_tokens_per_rank=32)
    assert report(schedule) and callable(context_attention) and callable(run_dynamic)
    named = set(re.findall(r"`([a-z]+-[a-z-]+)`", PAGE.read_text(encoding="utf-8")))
    assert {code for code in named if (PAGE.parent / "errors" / f"{code}.md").exists()} == {
        "bad-offsets",
        "context-heads",
        "context-unused",
        "flex-attention",
        "peers-out-of-reach",
    }
