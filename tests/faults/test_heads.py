"""Attention heads that the axis does not divide, kv heads fewer than ranks, and parts shared by all heads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")

SPLIT = (mp.Rule("{q,k,v}", use="colwise"), mp.Rule("o", use="rowwise"))


class Attention(nn.Module):
    """Grouped-query attention that names its head counts, or asks torch for them with -1."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int = 4, dim: int = 8, count: bool = True) -> None:
        super().__init__()
        self.heads = heads if count else -1
        self.kv_heads, self.head_dim = kv_heads if count else -1, head_dim
        self.q = nn.Linear(dim, heads * head_dim)
        self.k, self.v = nn.Linear(dim, kv_heads * head_dim), nn.Linear(dim, kv_heads * head_dim)
        self.o = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(b, s, -1)).square().sum()


class SharedKey(nn.Module):
    """One key part shared by every head (as in multi-head latent attention's rotary part)."""

    def __init__(self, heads: int = 4, head_dim: int = 6, dim: int = 8) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q, self.k = nn.Linear(dim, heads * head_dim), nn.Linear(dim, heads * head_dim)
        self.v, self.shared = nn.Linear(dim, heads * head_dim), nn.Linear(dim, head_dim)
        self.o = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        k = k + self.shared(x).unsqueeze(1)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2)).square().sum()


class ExpandedKey(SharedKey):
    """The shared part is expanded over the heads and concatenated with each head's own."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        shared = self.shared(x).view(b, s, 1, self.head_dim).transpose(1, 2).expand(-1, k.shape[1], -1, -1)
        scores = torch.cat([q, q], -1) @ torch.cat([k, shared], -1).transpose(-1, -2)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).square().sum()


class Slopes(nn.Module):
    """A learned number a head (a sink, a slope) added to the scores of that head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.o = nn.Linear(8, 8)
        self.slope = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * self.slope.view(1, -1, 1, 1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).square().sum()


X = {"x": numbers(3, 5, 8)}


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("heads", [3, 5])
def test_heads_that_do_not_divide_although_their_columns_do(heads, count):
    # 3 heads of 4 are 12 columns: a test on columns passes, and a view by -1 would invent 1.5 heads a rank.
    exact(partial(Attention, heads, heads, count=count), plan_of(X, *SPLIT))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_fewer_than_ranks(kv_heads):
    # torchtitan#2574: 8 heads, 2 kv heads, tp 4.
    exact(partial(Attention, 8, kv_heads), plan_of(X, *SPLIT, mesh={"tp": 4}), 4)


def test_kv_heads_that_do_not_divide_while_heads_do():
    exact(partial(Attention, 6, 3), plan_of(X, *SPLIT))


@pytest.mark.parametrize("model", [SharedKey, ExpandedKey])
def test_a_key_shared_by_all_heads_gets_its_gradient_from_every_rank(model):
    # Megatron-LM#1699: each rank sees the gradient of its own heads only.
    exact(model, plan_of(X, *SPLIT))


@pytest.mark.parametrize("layout", [mp.S(0), mp.R])
def test_a_number_a_head(layout):
    exact(Slopes, plan_of(X, *SPLIT, mp.Rule("", params={"slope": {"tp": layout}})))
