"""A lowering leaves nothing behind: a service that lowers plan after plan does not grow."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import meshplan as mp
from meshplan.compiler.timeline import Timeline


class Block(nn.Module):
    """Operators that save what they were given (linear, mul) and what they return (rsqrt, softmax)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)
        return self.down(self.up(x).softmax(0))


def left() -> int:
    gc.collect()
    return sum(issubclass(type(o), (FakeTensor, Timeline)) for o in gc.get_objects())


def test_nothing_of_a_lowering_stays_in_memory() -> None:
    plan = mp.Plan(mesh={"tp": 2}, rules=[mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise")])
    before = left()
    for _ in range(2):
        mp.lower(Block(), plan, world_size=2, inputs={"x": torch.ones(5, 6)})
    assert left() == before
