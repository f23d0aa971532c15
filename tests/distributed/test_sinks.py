"""Attention sinks under cp: exact by every method where they are one call, and without a section where written out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import meshplan as mp
from meshplan.models.rotary import Rotary
from meshplan.models.sink_attention import SinkAttention
from meshplan.ops.attention.sinks import sink_attention
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("pool")
S = mp.S


class Sinking(nn.Module):
    """Four query heads on two, with sinks, in a window of five or in none."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.rotary, self.attention = Rotary(4, 100.0, None), SinkAttention(8, 4, 2, 4, window)
        self.attention.wk.bias.requires_grad_(False)  # whose gradient is zero but for rounding

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(torch.arange(x.shape[1]))
        return self.attention(x, cos, sin).pow(2).mean()


def plan(mesh: dict[str, int], length: int, method: str | None, balance: str = "zigzag") -> mp.Plan:
    x = mp.Input(shape=(2, length, 8), dtype=torch.float64, place={"dp": S(0), "cp": S(1)})
    section: dict[str, Any] = {"attention": ["attention"], "method": method, "balance": balance}
    split = [
        mp.Rule("attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("attention.wo", use="rowwise"),
        mp.Rule("attention", params={"sinks": {"tp": S(0)}}),
    ]
    return mp.Plan(
        mesh=mesh, inputs={"x": x}, rules=split if "tp" in mesh else [],
        context=None if method is None else section | ({"inner": 2} if method == "hybrid" else {}),
    )  # fmt: skip


WAYS = [
    ({"cp": 2}, 20, "ring", "zigzag"),
    ({"cp": 2}, 22, "ring", "contiguous"),
    ({"cp": 2}, 22, "allgather", "contiguous"),
    ({"cp": 2}, 26, "ulysses", "contiguous"),
    ({"cp": 4}, 24, "hybrid", "zigzag"),
    ({"cp": 2, "tp": 2}, 20, "ring", "zigzag"),
    ({"dp_shard": 2, "cp": 2}, 20, "ulysses", "zigzag"),
    ({"cp": 2}, 22, None, ""),
    ({"tp": 2}, 7, None, ""),
]


@pytest.mark.parametrize(("way", "window"), covering(WAYS, [None, 5]))
def test_sinks_and_their_gradients_are_those_of_one_device(way, window):
    mesh, length, method, balance = way
    n = functools.reduce(int.__mul__, mesh.values())
    receipt = mp.verify(functools.partial(Sinking, window), plan(mesh, length, method, balance), nproc=n)
    assert receipt.passed, str(receipt)
    assert receipt.check("gradients").error < 1e-12


def test_a_ring_sends_grouped_keys_as_they_are():
    low = mp.lower(Sinking(5).double(), plan({"cp": 2}, 20, "ring"), 2)
    sent = [c.elements for c in low.collectives if c.axis == "cp" and c.op == "send" and c.phase == "forward"]
    assert sent == [2 * 2 * 10 * 4 * 2]  # 2 sequences x 2 key heads x 10 positions x head dim 4, keys and values


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    s_aux: Tensor, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What docs/context.md registers with transformers."""
    out = sink_attention(query, key, value, s_aux, attention_mask, attention_mask is None, scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def gpt_oss(attention: str) -> nn.Module:
    """transformers' gpt-oss of two layers, the first in a window of five."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register("sinks", attend)
    AttentionMaskInterface.register("sinks", sdpa_mask)
    config = transformers.GptOssConfig(
        vocab_size=31, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_local_experts=2, num_experts_per_tok=1, sliding_window=5, use_cache=False,
        max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )


def gpt_oss_plan(method: str | None) -> mp.Plan:
    ids = mp.Input(shape=(2, 20), dtype=torch.int64, place={"cp": S(1)})
    return mp.Plan(
        mesh={"cp": 2}, inputs={"input_ids": ids, "labels": ids},
        context=None if method is None else {"attention": ["model.layers.*.self_attn"], "method": method},
        experts={"at": ["model.layers.*.mlp"], "ep": 1},
    )  # fmt: skip


@pytest.mark.parametrize(("attention", "method"), [("eager", None), ("sinks", "ring"), ("sinks", "ulysses")])
def test_transformers_own_is_exact_written_out_and_as_one_call(attention, method):
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    given = functools.partial(gpt_oss, attention)
    receipt = mp.verify(given, gpt_oss_plan(method), nproc=2, rtol=2e-6, optimizer=sgd)
    assert receipt.passed, str(receipt)


def test_written_out_in_a_section_is_refused_by_layer():
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(gpt_oss("eager"), gpt_oss_plan("ring"), 2)
    error = caught.value
    assert error.code == "context-unused" and error.module == "model.layers.0.self_attn"
    assert "attention written out in products gathers its keys without this section" in str(error.legal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_call_itself_is_attention_with_one_more_key_that_has_no_value(is_causal):
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v, sinks, bias = draw(2, 4, 7, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 5), draw(4), draw(2, 1, 7, 7)
    if is_causal:
        bias = bias.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    rows = sinks.view(1, 4, 1, 1).expand(2, 4, 7, 1)
    more = torch.cat([bias.expand(2, 4, 7, 7), rows - 0.0], -1)
    keys = torch.cat([k.repeat_interleave(2, 1), torch.zeros(2, 4, 1, 3, dtype=q.dtype)], 2)
    values = torch.cat([v.repeat_interleave(2, 1), torch.zeros(2, 4, 1, 5, dtype=q.dtype)], 2)
    want = nn.functional.scaled_dot_product_attention(q, keys, values, more, scale=0.3)
    got = sink_attention(q, k, v, sinks, bias, is_causal, 0.3, True)
    assert torch.allclose(got, want, rtol=0, atol=1e-14)
