"""Coverage of transformers: representative classes are exact, tiny configs keep what matters, results are kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.hf_coverage.case import run
from benchmarks.hf_coverage.run import Cache, run_all
from benchmarks.hf_coverage.table import page
from benchmarks.hf_coverage.tiny import tiny_batch, tiny_config, tiny_model


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bart", "mixtral", "deepseek_v3", "mamba"])
def test_a_class_is_planned_and_exact_in_every_call(model_type: str) -> None:
    found = run(model_type, "tp2")
    assert found["outcome"] == "exact", found
    assert (
        found["share"] > 0.3
    )  # what the solver does not finish in its seconds on a busy machine is less than it could be


def test_heads_and_key_heads_differ_and_one_layer_of_each_kind_is_kept() -> None:
    config = tiny_config("gemma2")
    assert config.num_attention_heads != config.num_key_value_heads and config.vocab_size % 2 == 1
    assert sorted(set(config.layer_types)) == sorted(config.layer_types) and len(config.layer_types) == 2


@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_next", "gpt_oss", "rwkv", "musicgen"])
def test_other_kinds_of_models_are_built_small_and_run(model_type: str) -> None:
    model = tiny_model(model_type)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    loss = model(**tiny_batch(model_type)).loss
    assert torch.isfinite(loss)


def test_labels_are_ignored_unevenly() -> None:
    ignored = (tiny_batch("llama")["labels"] == -100).sum(1)
    assert len(set(ignored.tolist())) == len(ignored)


def _work(model_type: str, composition: str) -> dict[str, Any]:
    return {"type": model_type, "composition": composition, "outcome": "refused", "reason": "a | b", "code": "no-rule"}


def test_a_run_goes_on_where_it_was_stopped_and_its_page_says_why(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    kept = {"type": "llama", "composition": "tp2", "outcome": "exact", "loss": 0.0, "gradients": 1e-12, "share": 1.0}
    late = {"type": "gpt2", "composition": "tp2", "outcome": "gave up", "reason": "600 s"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (kept, late)))
    run_all([("llama", "tp2"), ("gpt2", "tp2")], _work, Cache(path), 1)
    found = Cache(path).found
    assert found["llama", "tp2"]["outcome"] == "exact" and found["gpt2", "tp2"]["outcome"] == "refused"
    text = page(list(found.values()))
    assert "| llama |" in text and "a \\| b" in text and "refused [no-rule]" in text


def test_the_page_has_a_table_for_each_mesh_and_says_how_rows_were_checked() -> None:
    common = {"class": "LlamaForCausalLM", "built": True, "planned": True, "outcome": "exact", "regions": "local"}
    one = common | {"type": "llama", "composition": "tp2", "checked": "ranks", "loss": 0.0, "gradients": 3.2e-12}
    one |= {"share": 0.875, "plan s": 1.5, "total s": 6.25}
    two = common | {"type": "llama", "composition": "tp2+sp x dp_shard2", "checked": "calls", "loss": 2e-9}
    two |= {"gradients": 2e-9, "share": 1.0, "plan s": 2.5, "total s": 7.0}
    peer = {"type": "llama", "composition": "peer", "class": "LlamaForCausalLM", "outcome": "wrong", "reason": "x"}
    text = page([one, two, peer])
    first, second = text.split("## tp2+sp x dp_shard2")
    row = "| llama | LlamaForCausalLM | yes | yes | exact |"
    assert f"{row} 0 | 3e-12 | ranks | 0.88 | local | 1.5 | 6.25 | wrong |" in first.split("## tp2\n")[1]
    assert f"{row} 2e-09 | 2e-09 | calls | 1.00 | local | 2.5 | 7.0 |\n" in second
    # run, built, planned, exact, wrong, refused, failed, gave up, by ranks, median share, at least 0.9, median plan s
    assert "| tp2 | 1 | 1 | 1 | 1 | 0 | 0 | 0 | 0 | 1 | 0.88 | 0 of 1 | 1.50 |" in text
    assert "| tp2+sp x dp_shard2 | 1 | 1 | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 1.00 | 1 of 1 | 2.50 |" in text
    assert "| transformers, tp2 | 1 | 1 | 1 | 0 | 1 | 0 | 0 | 0 | - | - | - | - |" in text
