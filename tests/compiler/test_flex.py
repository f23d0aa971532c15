"""flex_attention in a plan: what it lowers to, and what is refused by name, line and module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import meshplan as mp
from meshplan import compat
from meshplan.ops.attention.flex import taken_on_rank

S = mp.S


def _causal(b, h, q, kv):
    return q >= kv


def blocks(n: int) -> Any:
    return create_block_mask(_causal, None, None, n, n, device="cpu")


def alibi(score, b, h, q, kv):
    return score - (q - kv).abs()


class Attends(nn.Module):
    """Hands `options` to flex_attention, with a block mask for `rows` positions, or for those it sees."""

    def __init__(self, rows: int | None = None, reads: bool = False, **options: Any) -> None:
        super().__init__()
        self.qkv, self.rows, self.reads, self.options = nn.Linear(6, 18), rows, reads, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = blocks(self.rows or x.shape[1])
        if self.reads:
            q = q * mask.sparsity()
        out = flex_attention(q, k, v, block_mask=mask, **self.options)
        return (out if isinstance(out, Tensor) else out[0]).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = Attends(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).pow(2).mean()


def plan(method: str = "ring", **sections: Any) -> mp.Plan:
    x = mp.Input(shape=(2, 12, 6), dtype=torch.float64, place={"cp": S(1)})
    return mp.Plan(mesh={"cp": 2}, inputs={"x": x}, context={"attention": ["attention"], "method": method}, **sections)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"score_mod": alibi}, "the score function alibi"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"return_aux": AuxRequest(lse=True)}, "log-sum-exp"),
        ({"return_aux": AuxRequest(max_scores=True)}, "maxima"),
        ({"rows": 20}, "a block mask for 20 x 20 positions, where there are 12 x 12"),
        ({"reads": True}, "of which the model reads"),
    ],
)
def test_what_no_rank_could_honour_is_refused_at_its_line(options, said):
    with pytest.raises(mp.PlanError, match="flex-attention") as caught:
        mp.lower(Model(**options).double(), plan(), 2)
    error = caught.value
    assert said in error.message and error.module == "attention"
    assert error.where is not None and error.where.file == __file__


def test_a_call_in_a_unit_to_compile_is_refused():
    with pytest.raises(mp.PlanError, match="attention calls flex_attention, and attention is compiled") as caught:
        mp.lower(Model().double(), plan("allgather", compile=mp.Compile(units=["attention"])), 2)
    assert caught.value.code == "flex-attention"


def test_a_ring_of_it_sends_what_a_ring_of_the_other_attention_sends():
    low = mp.lower(Model(score_mod=lambda score, b, h, q, kv: score).double(), plan(), 2)
    sent = [(c.op, c.phase, c.elements, c.module) for c in low.collectives if c.axis == "cp" and c.op == "send"]
    # 2 sequences x 2 heads x 6 positions a rank x head dim 3, keys and values; backward them and their gradients.
    assert sent == [("send", "forward", 144, "attention")] + [("send", "backward", 144, "attention")] * 2


def test_ranks_that_alone_are_asked_for_a_log_sum_exp_give_one_that_cannot_be_read():
    q = torch.randn(1, 2, 5, 3)
    with compat.taking_flex(taken_on_rank()):
        out, aux = flex_attention(q, q, q, return_aux=AuxRequest(lse=True))
    assert torch.allclose(out, nn.functional.scaled_dot_product_attention(q, q, q))
    assert aux.lse.shape == (1, 2, 5)
    with pytest.raises(RuntimeError):
        aux.lse + q.sum(-1)
