"""What backward keeps of gathered sequences, saved or gathered again: bytes and collectives of a Llama by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import meshplan as mp
from meshplan.models.llama import Llama, LlamaConfig

BATCH, SEQ, DIM = 3, 6, 24
WHOLE = BATCH * SEQ * DIM
AGAIN = mp.Recompute(units=["layers.*"], policy="none", gather="regather")


def block_rules() -> list[mp.Rule]:
    split = {"tp": mp.S(1)}
    return [
        mp.Rule("tok_embeddings", use="embedding", output=split),
        mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", output=split),
        mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
        mp.Rule("layers.*.feed_forward.w2", use="rowwise", output=split),
        mp.Rule("norm", use="sequence"),
        mp.Rule("output", use="vocab_head"),
    ]


def plan(recompute: mp.Recompute | None = None, **more) -> mp.Plan:
    inputs = {name: mp.Input(shape=(BATCH, SEQ), dtype=torch.int64) for name in ("tokens", "labels")}
    return mp.Plan(mesh={"tp": 2}, inputs=inputs, rules=block_rules(), recompute=recompute, **more)


def lowered(p: mp.Plan) -> mp.Lowered:
    with torch.device("meta"):
        model = Llama(LlamaConfig(dim=DIM, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=30))
    return mp.lower(model, p, world_size=2)


@pytest.fixture(scope="module")
def saved() -> mp.Lowered:
    return lowered(plan())


@pytest.fixture(scope="module")
def again() -> mp.Lowered:
    return lowered(plan(AGAIN))


def test_each_gathered_input_keeps_the_whole_or_half_of_it(saved, again):
    sites = [f"layers.{i}.{part}" for i in range(2) for part in ("attention", "feed_forward")]
    assert [g.module for g in again.gathers] == [*sites, "output"]
    assert [g.again for g in again.gathers] == [True] * 4 + [False]
    assert not any(g.again for g in saved.gathers)
    for g in (*saved.gathers, *again.gathers):
        assert (g.whole_bytes, g.shard_bytes, g.sent_bytes) == (4 * WHOLE, 2 * WHOLE, 2 * WHOLE)


def test_a_layer_keeps_half_of_its_two_gathered_sequences(saved, again):
    before, after = saved.to_json()["kept_bytes"], again.to_json()["kept_bytes"]
    assert list(before) == ["layers.0", "layers.1"]
    assert [before[k] - after[k] for k in before] == [2 * 2 * WHOLE] * 2


def test_backward_gathers_each_input_once_where_its_last_use_is(saved, again):
    def backward(low):
        return [(c.op, c.module) for c in low.collectives if c.phase == "backward"]

    def layer(i, op="all_gather"):
        a, f = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        return [
            ("all_gather", f"{f}.w2"), (op, f), ("reduce_scatter", f),
            ("all_gather", f"{a}.wo"), (op, a), ("reduce_scatter", a),
        ]  # fmt: skip

    middle = layer(1) + layer(0)
    ends = [("all_gather", "tok_embeddings"), ("all_reduce", "")]
    assert backward(again) == [("reduce_scatter", "output"), *middle, *ends]
    extra = [item for item in middle if item[0] == "all_gather" and item[1].endswith(("attention", "feed_forward"))]
    assert sorted(backward(saved) + extra) == sorted(backward(again))


def test_only_the_units_named_gather_again():
    low = lowered(plan(replace(AGAIN, units=("layers.1",))))
    assert [g.module for g in low.gathers if g.again] == ["layers.1.attention", "layers.1.feed_forward"]


def test_explain_shows_both_choices(again):
    lines = [" ".join(line.split()) for line in again.explain(verbose=1, width=160).splitlines()]
    assert "gathered input axis save keeps regather keeps and sends chosen" in lines
    assert "layers.[0-1].attention x x2 tp 1.7 KiB 864 B 864 B regather" in lines
    assert "output input tp 1.7 KiB 864 B 864 B save" in lines


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        x.mul_(2.0)
        return y + x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = WritesToItsInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x)).sum()


def test_an_input_that_is_written_to_is_refused():
    rules = [
        mp.Rule("", input={"x": {"tp": mp.S(1)}}),
        mp.Rule("inner", input={"x": {"tp": mp.R}}),
    ]
    inputs = {"x": mp.Input(shape=(3, 4, 8), dtype=torch.float32)}
    p = mp.Plan(mesh={"tp": 2}, inputs=inputs, rules=rules, recompute=replace(AGAIN, units=("inner",)))
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(Outer(), p, world_size=2)
    assert caught.value.code == "regather-in-place"
    assert caught.value.module == "inner"


def test_a_compiled_module_cannot_gather_again():
    with pytest.raises(mp.PlanError) as caught:
        lowered(plan(AGAIN, compile=mp.Compile(units=["layers.*"])))
    assert caught.value.code == "regather-compiled"
