"""What the examples of docs/errors start from: a small model, its input, and a plan of some rules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.models.llama import llama_tiny


class Mlp(nn.Module):
    """up: 8 -> 6, down: 6 -> 8, and the sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()


def plan(*rules: mp.Rule, mesh: Any = None, inputs: Any = None, **sections: Any) -> mp.Plan:
    """A plan for `Mlp` on tp 2, or on `mesh`."""
    x = mp.Input(shape=(4, 8), place={"dp": mp.S(0)})
    return mp.Plan(mesh=mesh or {"tp": 2}, inputs={"x": x} if inputs is None else inputs, rules=list(rules), **sections)


NAMES = {
    "torch": torch, "F": F, "nn": nn, "Tensor": Tensor, "mp": mp, "S": mp.S, "R": mp.R, "P": mp.P, "Mlp": Mlp, "plan": plan,
    "llama_tiny": llama_tiny,
}  # fmt: skip
