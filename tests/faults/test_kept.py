"""Tensors that outlive a forward: in attributes, in buffers assigned anew, in parameters written by the model itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Keeps(nn.Module):
    """A model that puts something aside in one of several ways, and reads it again in the next call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(4, 6), nn.Linear(6, 4), how
        self.register_buffer("mean", torch.zeros(4))
        self.aux: Any = None
        self.many: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        y = self.down(h)
        match self.how:
            case "attribute of the split":
                self.aux = h.square().mean()
            case "in a list":
                self.many.append(h.square().mean())
            case "attribute of the whole":
                self.aux = y.square().mean()
            case "sum over rows":
                self.aux = y.square().sum()
            case "rows":
                self.aux = y
            case "buffer":
                self.mean = 0.9 * self.mean + 0.1 * y.detach().flatten(0, 1).mean(0)
                y = y - self.mean
            case "buffer in place":
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(y.flatten(0, 1).mean(0), alpha=0.1)
                y = y - self.mean
            case "weight":
                with torch.no_grad():
                    self.up.weight.clamp_(-0.3, 0.3)
            case "weight norm":
                with torch.no_grad():
                    self.up.weight.div_(self.up.weight.norm(dim=1, keepdim=True))
            case "data":
                self.up.weight.data = self.up.weight.data * 0.5
        return y.pow(3).sum()


PAIR = (mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise"))
PLANS = {
    "tp": plan_of({"x": numbers(4, 5, 4)}, *PAIR),
    "dp": plan_of({"x": numbers(4, 5, 4, dp=mp.S(0))}, mesh={"dp_shard": 2}),
}
EXACT = [
    ("attribute of the whole", "tp"), ("attribute of the whole", "dp"), ("attribute of the split", "dp"), ("rows", "tp"),
    ("rows", "dp"), ("buffer", "tp"), ("buffer in place", "tp"), ("weight", "tp"), ("weight", "dp"), ("weight norm", "tp"),
]  # fmt: skip
REFUSED = [
    ("attribute of the split", "tp", "kept-tensor"), ("in a list", "tp", "kept-tensor"), ("sum over rows", "dp", "kept-tensor"),
    ("buffer", "dp", "kept-tensor"), ("buffer in place", "dp", "kept-tensor"), ("data", "tp", "in-place"),
    ("data", "dp", "in-place"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "plan"), EXACT)
def test_what_is_whole_may_be_kept(how, plan):
    exact(partial(Keeps, how), PLANS[plan], steps=3)


@pytest.mark.parametrize(("how", "plan", "code"), REFUSED)
def test_a_part_must_not_be_kept(how, plan, code):
    # Read outside, or by the next call, it would be taken for the whole.
    refused(lambda: Keeps(how).double(), PLANS[plan], code)


def auxiliary(plan: mp.Plan, how: str) -> float:
    """On a rank: how far gradients of the loss and a kept auxiliary loss are from one device's."""
    torch.manual_seed(0)
    model = Keeps(how).double()
    x = torch.randn(4, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (model(x) + model.aux).backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    model.aux = None
    mp.parallelize(model, plan)
    (model(**mp.shard_batch(model, {"x": x})) + model.aux).backward()
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return max((grads[n] - g).abs().max().item() for n, g in want.items())


@pytest.mark.parametrize(
    ("plan", "how"),
    [("tp", "attribute of the whole"), ("dp", "attribute of the whole"), ("dp", "attribute of the split")],
)
def test_an_auxiliary_loss_in_an_attribute_has_the_gradient_of_one_device(pool, plan, how):
    assert max(pool.run(auxiliary, PLANS[plan], how, world=2)) < 1e-12
