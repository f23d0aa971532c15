"""Modules that are called several times a step: what their calls may differ in, exactly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align

SHAPE = (3, 10, 12)


def inputs() -> dict[str, Tensor]:
    return {"x": torch.linspace(-2, 2, 3 * 10 * 12, dtype=torch.float64).sin().reshape(SHAPE)}


def plan(*rules: mp.Rule) -> mp.Plan:
    return mp.Plan(mesh={"tp": 2}, inputs={"x": mp.Input(shape=SHAPE, dtype=torch.float64)}, rules=list(rules))


class OneDropout(nn.Module):
    """Attention that passes its scores, and what it returns, through one dropout of rate 0, as XLNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(12, 4, 3) * 0.3) for _ in range(3))
        self.o = nn.Parameter(torch.randn(4, 3, 12) * 0.3)
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bsd,dhe->bhse", x, w) for w in (self.q, self.k, self.v))
        scores = self.drop(torch.einsum("bhse,bhte->bhst", q, k).softmax(-1))
        out = torch.einsum("bshe,hed->bsd", torch.einsum("bhst,bhte->bshe", scores, v), self.o)
        return self.norm(x + self.drop(out)).square().mean()


def test_one_dropout_passes_heads_and_sums_of_heads() -> None:
    heads = mp.Rule("", params={name: {"tp": mp.S(1)} for name in "qkv"} | {"o": {"tp": mp.S(0)}})
    assert align(OneDropout(), plan(heads), 2, inputs=inputs()).distance < 1e-12
    low = mp.lower(OneDropout().double(), plan(heads), 2)
    assert all(c.elements < 3 * 4 * 10 * 10 for c in low.collectives)  # no scores are sent: they stay split


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Refined(nn.Module):
    """A block applied again and again, with gradients in the last round alone, as in hierarchical reasoning models."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block = nn.Linear(12, 12), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        with torch.no_grad():
            state = self.block(self.block(h))
        return self.block(h + state).square().mean()


def test_rounds_without_gradients_run_as_the_one_that_has_them() -> None:
    rules = (
        mp.Rule("block.up", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}),
        mp.Rule("block.down", params={"weight": {"tp": mp.S(1)}}, output={"tp": mp.S(1)}),
        mp.Rule("block", output={"tp": mp.R}),
    )
    assert align(Refined(), plan(*rules), 2, inputs=inputs()).distance < 1e-12
