"""Receipts: a page of text, JSON there and back, and a verdict."""

import dataclasses
import json
import math

import pytest

from meshplan.errors import PlanError
from meshplan.verify.receipt import Check, Receipt

GOOD = Receipt(
    model="llama-tiny",
    composition="dp_shard 2 x tp 2 + sp",
    mesh={"dp_shard": 2, "tp": 2},
    world_size=4,
    dtype="float64",
    seed=0,
    steps=2,
    inputs={"tokens": "int64[8, 32]", "labels": "int64[8, 32]"},
    device="cpu, gloo",
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "meshplan": "0.1.0"},
    checks=(
        Check("loss", True, "step 1: 5.5, one device 5.5", 2.2e-16, 1e-9),
        Check("gradients", True, "layers.1.attention.wq.weight", 1.3e-14, 1e-9),
        Check("replicas", True, "6 copies of 20 shards equal bit for bit"),
    ),
    not_checked=("GPUs and NCCL (ranks ran on CPUs over gloo)", "other shapes"),
)
BAD = dataclasses.replace(
    GOOD,
    checks=(
        *GOOD.checks,
        Check("parameters", False, "norm.weight", math.inf, 1e-9),
        Check("collectives", False, "step 0, rank 1: " + "a very long first difference " * 6),
    ),
)


def test_a_receipt_passes_when_every_check_does():
    assert GOOD.passed and GOOD
    assert not BAD.passed and not BAD
    assert GOOD.raise_if_failed() is GOOD
    assert BAD.check("parameters").error == math.inf


def test_a_failed_receipt_raises_with_what_failed_and_nothing_else():
    with pytest.raises(PlanError) as caught:
        BAD.raise_if_failed()
    assert caught.value.code == "verify-failed"
    assert "parameters: error inf above 1.0e-09, norm.weight" in str(caught.value)
    assert "gradients" not in str(caught.value)


@pytest.mark.parametrize("receipt", [GOOD, BAD])
def test_json_there_and_back(receipt):
    text = json.dumps(receipt.to_json(), allow_nan=False)  # strict: JSON has no Infinity
    assert Receipt.from_json(text) == receipt
    assert json.loads(text)["passed"] is receipt.passed


def test_text_says_what_was_and_was_not_checked():
    lines = str(GOOD).splitlines()
    assert lines[0] == "verified: llama-tiny   dp_shard 2 x tp 2 + sp"
    assert lines[1] == "4 ranks (cpu, gloo) against one device   float64   2 steps   seed 0"
    assert lines[2] == "inputs tokens int64[8, 32], labels int64[8, 32]"
    assert "gradients      ok       1.3e-14   1.0e-09    layers.1.attention.wq.weight" in lines
    assert "replicas       ok       equal     equal      6 copies of 20 shards equal bit for bit" in lines
    assert "not checked: GPUs and NCCL (ranks ran on CPUs over gloo); other shapes" in lines
    assert lines[-1] == "versions: python 3.11.7, torch 2.13.0+cpu, meshplan 0.1.0"


def test_text_fits_100_columns_and_loses_no_word():
    text = str(BAD)
    assert text.startswith("FAILED: llama-tiny")
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("difference") == 7  # 6 in the detail, 1 in the head of the table
