"""Symbolic counts against closed forms of a Llama block (h 32, ffn 48, 8 heads of 4, vocabulary 40)."""

from math import gcd

import pytest
import torch
from sympy import Symbol, ceiling

import meshplan as mp
from meshplan.models.llama import Llama, LlamaConfig

H, FFN, VOCAB = 32, 48, 40
SIZES = {"dim": H, "n_layers": 1, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": FFN, "vocab_size": VOCAB}
b, s, tp, dp_shard, dp_replicate = (
    Symbol(name, positive=True, integer=True) for name in ("b", "s", "tp", "dp_shard", "dp_replicate")
)


def lowered(mesh: dict[str, int], world: int, rules=(), **sections) -> mp.Lowered:
    inputs = {name: mp.Input(shape=(8, 12), dtype=torch.int64, place={"dp": mp.S(0)}) for name in ("tokens", "labels")}
    with torch.device("meta"):
        model = Llama(LlamaConfig(**SIZES))
    return mp.lower(model, mp.Plan(mesh=mesh, inputs=inputs, rules=rules, **sections), world_size=world)


def sequence_parallel() -> list[mp.Rule]:
    to_sequence = {"tp": mp.S(1)}
    return [
        mp.Rule("tok_embeddings", use="embedding", output=to_sequence),
        mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", output=to_sequence),
        mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
        mp.Rule("layers.*.feed_forward.w2", use="rowwise", output=to_sequence),
        mp.Rule("norm", use="sequence"),
        mp.Rule("output", use="vocab_head"),
    ]


@pytest.fixture(scope="module")
def tp_sp_fsdp() -> mp.Lowered:
    return lowered({"dp_shard": 2, "tp": 2}, 4, sequence_parallel(), fsdp={"units": ["layers.*"]})


def test_a_block_moves_the_residual_stream_four_times_each_way(tp_sp_fsdp):
    counts = tp_sp_fsdp.counts.expressions
    for phase in ("forward", "backward"):
        found = {k: e for k, e in counts.items() if k.startswith("layers.0.") and k.endswith(" tp")}
        found = {k: e for k, e in found.items() if f" {phase} " in k}
        assert sorted(k.split()[2] for k in found) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
        assert set(found.values()) == {H * b * s / dp_shard}


def test_a_unit_gathers_its_split_weights_and_whole_norms(tp_sp_fsdp):
    split = 4 * H * H + 3 * H * FFN
    whole = 2 * H
    counts = tp_sp_fsdp.counts.expressions
    for name in ("forward all_gather", "backward all_gather", "backward reduce_scatter"):
        assert counts[f"layers.0.parameters {name} dp_shard"] == split / tp + whole


def test_norm_gradients_partial_under_sequence_parallelism_travel_once(tp_sp_fsdp):
    assert tp_sp_fsdp.counts.expressions["(model).gradients backward all_reduce tp"] == 3 * H / dp_shard


def test_cross_entropy_sends_one_maximum_and_two_sums_a_token_and_one_count(tp_sp_fsdp):
    counts = tp_sp_fsdp.counts.expressions
    name = "(model).cross_entropy forward all_reduce"
    assert counts[f"{name} tp"] == b * s / dp_shard
    assert counts[f"{name} tp #2"] == 2 * b * s / dp_shard
    assert counts[f"{name} dp_shard"] == 1


def test_every_collective_has_a_formula_that_gives_its_elements(tp_sp_fsdp):
    d = tp_sp_fsdp.to_json(symbolic=True)
    assert d["uncounted"] == {}
    assert [c["id"] for c in d["collectives"]] == list(d["counts"])
    at = {b: 8, s: 12, tp: 2, dp_shard: 2}
    for c in d["collectives"]:
        assert tp_sp_fsdp.counts.expressions[c["id"]].subs(at) == c["elements"]


def test_conditions_name_what_each_axis_divides(tp_sp_fsdp):
    conditions = tp_sp_fsdp.to_json(symbolic=True)["conditions"]
    assert {"tp divides s", "dp_shard divides b"} <= set(conditions)
    split = gcd(H, FFN, VOCAB)
    assert f"tp divides {split} (all of {H}, {VOCAB}, {FFN})" in conditions


def test_nothing_is_lowered_again_unless_asked():
    low = lowered({"dp_replicate": 2}, 2)
    assert low.to_json()["counts"] == {}
    assert "counts" not in low.__dict__


def test_ddp_reduces_all_parameters_over_one_flattened_group():
    counts = lowered({"dp_replicate": 2, "dp_shard": 2}, 4).counts
    block = 4 * H * H + 3 * H * FFN + 2 * H
    whole = block + 2 * VOCAB * H + H
    assert counts.expressions["(model).gradients backward all_reduce dp_replicate+dp_shard"] == whole
    assert "dp_replicate*dp_shard divides b" in counts.conditions


def test_padded_parameters_keep_their_ceiling():
    """On 16 ranks no dim of a block of width 24 and 40 divides: dim 0 of every parameter is padded."""
    h, ffn = 24, 40
    inputs = {n: mp.Input(shape=(32, 4), dtype=torch.int64, place={"dp": mp.S(0)}) for n in ("tokens", "labels")}
    with torch.device("meta"):
        model = Llama(LlamaConfig(dim=h, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=ffn, vocab_size=36))
    plan = mp.Plan(mesh={"dp_shard": 16}, inputs=inputs, fsdp={"units": ["layers.*"]})
    n, counts = dp_shard, mp.lower(model, plan, world_size=16).counts.expressions
    # four h x h, w2 [h, ffn] and two norms [h] are padded to n ceil(h / n) rows, w1 and w3 [ffn, h] to n ceil(ffn / n)
    want = n * ceiling(h / n) * (4 * h + ffn + 2) + n * ceiling(ffn / n) * 2 * h
    assert counts["layers.0.parameters forward all_gather dp_shard"].expand() == want.expand()
    assert want.subs(n, 16) == 32 * 138 + 48 * 48


def test_the_degrees_that_were_looked_at_are_named():
    """8 heads split over 2, 4 and 8 ranks alike."""
    low = lowered({"tp": 2}, 2, sequence_parallel())
    assert "tp fitted at 2, 4, 8" in low.counts.conditions
