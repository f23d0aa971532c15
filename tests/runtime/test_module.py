"""What stands around a module's forward, and what does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align


class Scale(nn.Module):
    """Its forward is called by its parent, and directly by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mix = nn.Parameter(torch.ones(6)), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * self.scale

    def again(self, x: Tensor) -> Tensor:
        return self.forward(x.flip(0))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.head = Scale(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.child(x).view(x.shape[0], 2, 3).flatten(1)
        x = self.child.again(x).reshape(-1, 3, 2).flatten(1)
        return self.head(x).square().mean()


def test_a_forward_that_is_called_directly_is_its_callers_own_code():
    # Its edits were counted as a call of the child's, so that those of the parent fell on other torch calls.
    plan = mp.Plan(
        mesh={"tp": 2}, inputs={"x": mp.Input((4, 6), torch.float64)},
        rules=[
            mp.Rule("child.mix", params={"weight": {"tp": mp.S(0)}}),
            mp.Rule("head", params={"weight": {"tp": mp.S(1)}}),
        ],
    )  # fmt: skip
    align(Parent().double(), plan, 2)
