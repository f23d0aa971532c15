"""`meshplan bench`: on ranks it spawns, on ranks of torchrun, and never on none."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshplan.cli.main import PLAN_ERROR, app

PLAN = """
mesh: {tp: -1}
inputs:
  tokens: {dtype: int64, shape: [2, 8]}
  labels: {dtype: int64, shape: [2, 8]}
rules:
  - {at: "layers.*.feed_forward.{w1,w3}", use: colwise}
  - {at: "layers.*.feed_forward.w2", use: rowwise}
"""


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN)
    return str(file)


def check(report):
    assert report["model"] == "llama-tiny" and report["mesh"] == {"tp": 2} and report["tokens_per_step"] == 16
    assert set(report["programs"]) == {"meshplan", "one device", "parallelize_module + fully_shard"}
    assert all(found["tokens_per_s"] > 0 for found in report["programs"].values())
    # One all-reduce forward and one backward in each of 2 blocks, of 16 tokens x 64 floats.
    assert [(a["axis"], a["collectives"], a["bytes"]) for a in report["axes"]] == [("tp", 4, 4 * 16 * 64 * 4)]


def test_ranks_are_spawned_for_nproc(pool, plan):
    done = CliRunner().invoke(app, ["bench", plan, "--model", "llama-tiny", "--nproc", "2", "--steps", "1", "--json"])
    assert done.exit_code == 0, done.output
    check(json.loads(done.stdout))


def test_rank_0_of_torchrun_prints_the_report(plan):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launcher, "-m", "meshplan", "bench", plan, "--model", "llama-tiny", "--steps", "1", "--json"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout))


def test_without_ranks_it_says_how_to_start_some(plan, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(app, ["bench", plan, "--model", "llama-tiny"])
    assert done.exit_code == PLAN_ERROR
    assert "[no-ranks]" in done.stderr and "torchrun" in done.stderr
