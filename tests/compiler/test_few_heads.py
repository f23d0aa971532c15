"""Fewer kv heads than tensor-parallel ranks: each head is held by the ranks that need it, and nothing is gathered."""

from __future__ import annotations

import functools

import pytest
import torch

import meshplan as mp
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.verify.aligned import align


def llama(kv: int = 2, vocab: int = 36) -> Llama:
    return Llama(LlamaConfig(dim=24, n_layers=2, n_heads=12, n_kv_heads=kv, head_dim=6, ffn_dim=40, vocab_size=vocab))


RULES = [
    mp.Rule("tok_embeddings", use="embedding"),
    mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
    mp.Rule("layers.*.attention.wo", use="rowwise"),
    mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
    mp.Rule("layers.*.feed_forward.w2", use="rowwise"),
    mp.Rule("output", use="vocab_head"),
]


def plan(tp: int) -> mp.Plan:
    item = mp.Input(shape=(3, 10), dtype=torch.int64, place={})
    return mp.Plan(mesh={"tp": tp}, inputs={"tokens": item, "labels": item}, rules=RULES)


def test_the_axis_becomes_heads_times_copies():
    low = mp.lower(llama(), plan(4), 4)
    assert low.core.spec.axes == (("tp_kv", 2), ("tp_rep", 2))
    held = {p["name"]: (p["local_shape"], p["layout"]["tp"]) for p in low.placements}
    assert held["layers.1.attention.wk.weight"] == ([6, 24], "S(0, copies=2)")  # one head of 6 on each rank
    assert held["layers.0.attention.wv.weight"] == ([6, 24], "S(0, copies=2)")
    assert held["layers.0.attention.wq.weight"] == ([18, 24], "S(0)")


def test_only_the_kv_gradients_travel_between_copies():
    low = mp.lower(llama(), plan(4), 4)
    copies = [c for c in low.collectives if c.axis == "tp_rep"]
    # wk and wv of two layers, 6 x 24 each, in one bucket.
    assert [(c.op, c.phase, c.elements) for c in copies] == [("all_reduce", "backward", 4 * 6 * 24)]
    assert not [c for c in low.collectives if c.op == "all_gather"]


def test_rank_3_holds_the_second_head():
    from meshplan.compiler.commgraph import local_param_shape

    core = mp.lower(llama(), plan(4), 4).core
    wk = core.params["layers.0.attention.wk.weight"]
    assert [local_param_shape(wk, core.spec, rank) for rank in range(4)] == [(6, 24)] * 4
    assert wk.reduce == ("tp_rep",)


@pytest.mark.parametrize(("kv", "tp"), [(2, 4), (1, 2)])
def test_training_equals_one_device(pool, kv, tp):
    receipt = mp.verify(functools.partial(llama, kv), plan(tp), nproc=tp)
    assert receipt.passed, str(receipt)


def test_heads_are_gathered_beside_sizes_that_two_axes_cut_elsewhere_than_one():
    # 37 over 4 is 10 + 10 + 10 + 7; over 2 and then 2 it is 19 + 18, hence 10 + 9 + 9 + 9.
    model = llama(vocab=37)
    core = mp.lower(model, plan(4), 4).core
    assert core.params["layers.0.attention.wk.weight"].reduce == () and "tp_rep" not in core.spec.names
    align(model, plan(4), 4)


def test_uneven_sizes_that_are_cut_alike_are_exact(pool):
    # 39 over 4 is 10 + 10 + 10 + 9, and so it is over 2 and 2.
    receipt = mp.verify(functools.partial(llama, 2, 39), plan(4), nproc=4)
    assert receipt.passed, str(receipt)
