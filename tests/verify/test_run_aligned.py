"""`verify(aligned=True)` adds a row for every call's values; a program that is wrong in one call is named there."""

from __future__ import annotations

import torch

import meshplan as mp
from meshplan.errors import PlanError, Where
from meshplan.models.llama import Llama, LlamaConfig


def llama() -> Llama:
    return Llama(LlamaConfig(dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=12, vocab_size=11))


def plan() -> mp.Plan:
    item = mp.Input(shape=(3, 5), dtype=torch.int64, place={})
    rules = [mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"), mp.Rule("layers.*.attention.wo", use="rowwise")]
    return mp.Plan(mesh={"tp": 2}, inputs={"tokens": item, "labels": item}, rules=rules)


def test_every_call_is_compared(pool):
    receipt = mp.verify(llama, plan(), nproc=2, steps=1, aligned=True)
    row = receipt.check("calls")
    assert receipt.passed and row.passed and int(row.detail.split()[0]) > 20
    assert row.error is not None and row.error < 1e-9


def test_a_wrong_call_fails_the_receipt_and_is_named(pool, monkeypatch):
    wrong = PlanError("add gives another value", code="not-aligned", where=Where("model.py", 7), module="layers.0")

    def misaligned(*args: object) -> None:
        raise wrong

    monkeypatch.setattr("meshplan.verify.aligned.align", misaligned)
    receipt = mp.verify(llama, plan(), nproc=2, steps=1, aligned=True)
    assert not receipt.passed and receipt.check("calls").detail.startswith("model.py:7: add gives another value")


def test_it_is_not_run_unasked(pool):
    receipt = mp.verify(llama, plan(), nproc=2, steps=1)
    assert "calls" not in [check.name for check in receipt.checks]
