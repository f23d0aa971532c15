"""Latent attention against loops over heads, with widths that are all different."""

import math

import torch

from meshplan.models.latent_attention import LatentAttention
from meshplan.models.rotary import Rotary

HEADS, NOPE, ROPE, V = 3, 6, 4, 5


def attention(gain: float = 1.0) -> LatentAttention:
    torch.manual_seed(1)
    return LatentAttention(
        11, HEADS, q_rank=8, kv_rank=7, nope_dim=NOPE, rope_dim=ROPE, v_dim=V, eps=1e-6, score_gain=gain
    ).double()


def by_hand(a: LatentAttention, x: torch.Tensor, gain: float) -> torch.Tensor:
    def norm(z, weight):
        return z / (z.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    seq = x.shape[0]
    turn = torch.polar(
        torch.ones(seq, 2).double(), torch.arange(seq)[:, None] * torch.tensor([1.0, 100**-0.5]).double()
    )

    def rope(z):
        return torch.view_as_real(torch.view_as_complex(z.reshape(seq, 2, 2).contiguous()) * turn).reshape(seq, ROPE)

    q = norm(x @ a.wq_a.weight.T, a.q_norm.weight) @ a.wq_b.weight.T
    both = x @ a.wkv_a.weight.T
    kv = norm(both[:, :7], a.kv_norm.weight) @ a.wkv_b.weight.T
    k_rope = rope(both[:, 7:])
    outs = []
    for h in range(HEADS):
        mine = q[:, h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
        own = kv[:, h * (NOPE + V) : (h + 1) * (NOPE + V)]
        scores = mine[:, :NOPE] @ own[:, :NOPE].T + rope(mine[:, NOPE:]) @ k_rope.T
        scores = scores * gain / math.sqrt(NOPE + ROPE)
        outs.append(scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf).softmax(-1) @ own[:, NOPE:])
    return torch.cat(outs, -1) @ a.wo.weight.T


def test_output_is_that_of_the_formulas():
    cos, sin = Rotary(ROPE, 100.0, None).double()(torch.arange(9))
    # float32 frequencies: those of the formula here are float64.
    x = torch.randn(2, 9, 11, dtype=torch.float64)
    for gain in (1.0, 1.9):
        a = attention(gain)
        expected = torch.stack([by_hand(a, row, gain) for row in x])
        torch.testing.assert_close(a(x, cos, sin), expected, rtol=1e-6, atol=1e-6)


def test_head_counts_are_read_off_the_tensors():
    whole, part = attention(), attention()
    with torch.no_grad():
        part.wq_b.weight = torch.nn.Parameter(whole.wq_b.weight[: 2 * (NOPE + ROPE)])
        part.wkv_b.weight = torch.nn.Parameter(whole.wkv_b.weight[: 2 * (NOPE + V)])
        part.wo.weight = torch.nn.Parameter(whole.wo.weight[:, : 2 * V])
        whole.wo.weight[:, 2 * V :] = 0
    cos, sin = Rotary(ROPE, 100.0, None).double()(torch.arange(5))
    x = torch.randn(1, 5, 11, dtype=torch.float64)
    torch.testing.assert_close(part(x, cos, sin), whole(x, cos, sin))
