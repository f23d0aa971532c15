"""Where a redistribution stands is where it works: what a module was handed is whole for all its uses, or for none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align


class SplitAndWhole(nn.Module):
    """Hands its input to a child, which computes on shards, and takes a median over the split dim, before or after."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first, self.child, self.scale = first, nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.first == "whole":
            middle = x.median(0).values * self.scale
            return self.child(x).pow(2).sum() + middle.pow(3).sum()
        total = self.child(x).pow(2).sum()
        return total + (x.median(0).values * self.scale).pow(3).sum()


class Inner(nn.Module):
    """The same, of an input that carries a gradient."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(4, 4), SplitAndWhole(first)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.up(x))


@pytest.mark.parametrize("model", [SplitAndWhole, Inner])
@pytest.mark.parametrize("first", ["split", "whole"])
def test_an_input_gathered_for_one_call_is_whole_for_every_other_use(model: type[nn.Module], first: str) -> None:
    # Gathered at the module's input, where all uses see it; the child was compiled for shards.
    x = mp.Input(shape=(4, 5, 4), dtype=torch.float64, place={"dp": mp.S(0)})
    assert align(model(first), mp.Plan(mesh={"dp_shard": 2}, inputs={"x": x}), 2).distance < 1e-12
