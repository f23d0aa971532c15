"""Code that looks at a value with gradients off, before it computes with it: the value's gradient is not lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align


class Router(nn.Linear):
    """Probabilities of the scores near the best one, which are chosen with gradients off, as sparse mixers do."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        with torch.no_grad():
            best = scores.max(-1, keepdim=True).values
            far = best - scores > 0.4
        return scores.masked_fill(far, -torch.inf).softmax(-1) + scores.softmax(-1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.down = nn.Linear(6, 10), Router(10, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.router(self.up(x).tanh())).square().mean()


@pytest.mark.parametrize("cut", [0, 1], ids=["scores split", "scores partial"])
def test_a_move_made_with_gradients_off_is_made_again_for_uses_that_have_one(cut: int) -> None:
    inputs = {"x": torch.linspace(-1, 1, 4 * 7 * 6, dtype=torch.float64).sin().reshape(4, 7, 6)}
    rules = [mp.Rule("router", params={"weight": {"tp": mp.S(cut)}} | ({"bias": {"tp": mp.S(0)}} if cut == 0 else {}))]
    if cut == 1:
        rules.append(mp.Rule("up", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}))
    plan = mp.Plan(mesh={"tp": 2}, inputs={"x": mp.Input(shape=(4, 7, 6), dtype=torch.float64)}, rules=rules)
    assert align(Routed(), plan, 2, inputs=inputs).distance < 1e-12


class Looked(nn.Module):
    """Positions chosen with gradients off, as sparse attention's indexers do, from what is then computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.look, self.down = nn.Linear(6, 10), nn.Linear(10, 8), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        with torch.no_grad():
            chosen = self.look(h).sum(-1, keepdim=True) > 0
        return self.down(h).masked_fill(chosen, 0.0).square().mean()


def test_no_backward_is_listed_for_what_runs_with_gradients_off(pool) -> None:
    inputs = {"x": torch.linspace(-1, 1, 4 * 7 * 6, dtype=torch.float64).sin().reshape(4, 7, 6)}
    split = {"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}
    plan = mp.Plan(
        mesh={"tp": 2},
        inputs={"x": mp.Input(shape=(4, 7, 6), dtype=torch.float64)},
        rules=[mp.Rule("look", params=split)],
    )
    low = mp.lower(Looked().double(), plan, 2)
    assert {c.phase for c in low.collectives} == {"forward"}
    assert mp.verify(Looked, plan, nproc=2, inputs=inputs, steps=1).passed
