"""What is in `p.grad` after any pattern of backward passes: one device's gradients, for every kind of parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.distributed.models import world_of
from tests.distributed.training import apart, full

S = mp.S


class Odd(nn.Module):
    """Every kind of parameter: split, replicated, 0-dim, two whose gradient is one tensor, frozen, and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 3)
        self.left, self.right = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(12))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 5), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x + self.frozen) * self.scale)
        return self.down(h + (self.left + self.right)).pow(2).mean()


MESHES = {
    "ddp4": ({"dp_replicate": 4}, None),
    "tp2": ({"tp": 2}, None),
    "zero3": ({"dp_shard": 4}, mp.Fsdp(units=["up"])),
    "zero2": ({"dp_shard": 4}, mp.Fsdp(units=["up"], strategy="zero2")),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, mp.Fsdp(units=["up"])),
    "zero3 x tp2": ({"dp_shard": 2, "tp": 2}, mp.Fsdp(units=["up"])),
}


def _plan(name: str) -> mp.Plan:
    mesh, fsdp = MESHES[name]
    rules = [mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise")] if "tp" in mesh else []
    place = {} if name == "tp2" else {"dp": S(0)}
    return mp.Plan(mesh=mesh, inputs={"x": mp.Input((8, 5), torch.float64, place)}, rules=rules, fsdp=fsdp)


def _x(seed: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _model() -> nn.Module:
    torch.manual_seed(1)
    model = Odd().double()
    with torch.no_grad():
        for p in (model.left, model.right):
            p.uniform_(-1, 1)
    return model


def _patterns(plan: mp.Plan | None) -> list[dict[str, Tensor]]:
    """Gradients after: one backward; another on top; a third on top of gradients that the user put there; a backward
    through the sum of two forwards."""
    model = _model()
    if plan is not None:
        model = mp.parallelize(model, plan)

    def loss(seed: int) -> Tensor:
        return model(_x(seed) if plan is None else mp.shard_batch(model, {"x": _x(seed)})["x"])

    def gradients() -> dict[str, Tensor]:
        return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    seen = []
    for seed in (0, 1):
        loss(seed).backward()
        seen.append(gradients())
    for p in model.parameters():
        if p.grad is not None:
            p.grad = torch.full_like(p, 0.25)
    loss(2).backward()
    seen.append(gradients())
    model.zero_grad()
    (loss(3) + 2 * loss(4)).backward()
    seen.append(gradients())
    return seen


@pytest.mark.parametrize("name", list(MESHES))
def test_gradients_add_up_and_frozen_and_unused_parameters_have_none(pool, name):
    plan = _plan(name)
    want = _patterns(None)
    assert set(want[0]) == {"up.weight", "up.bias", "down.weight", "down.bias", "left", "right", "scale"}
    for rank in pool.run(_patterns, plan, world=world_of(plan)):
        for got, expected in zip(rank, want, strict=True):
            assert apart(got, expected) < 1e-12


def _edited_in_place(plan: mp.Plan) -> dict[str, Tensor]:
    model = mp.parallelize(_model(), plan)
    model(**mp.shard_batch(model, {"x": _x(0)})).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(2.0)
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["ddp4", "tp2", "zero3 x tp2"])
def test_each_parameters_gradient_is_a_tensor_of_its_own(pool, name):
    # `left + right` hands both the same gradient; scaling each once must not scale one of them twice.
    plan = _plan(name)
    want = {n: 2 * g for n, g in _patterns(None)[0].items()}
    assert all(apart(got, want) < 1e-12 for got in pool.run(_edited_in_place, plan, world=world_of(plan)))


class Normed(nn.Module):
    """A BatchNorm1d between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))).pow(2).mean()


def _statistics(plan: mp.Plan | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and buffers after two steps of training."""
    torch.manual_seed(2)
    model = Normed().double()
    if plan is not None:
        model = mp.parallelize(model, plan)
    for seed in (0, 1):
        model.zero_grad()
        model(_x(seed) if plan is None else mp.shard_batch(model, {"x": _x(seed)})["x"]).backward()
    return {n: full(p.grad) for n, p in model.named_parameters()}, {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("name", ["ddp4", "zero3 x tp2"])
def test_batch_statistics_and_their_running_means_are_those_of_the_whole_batch(pool, name):
    """A mean of each rank's own statistics is not the batch's: torch's DDP trains another model here, silently."""
    gradients, buffers = _statistics(None)
    for got, kept in pool.run(_statistics, _plan(name)):
        # The gradient of `up.bias` is truly zero behind the norm: rounding is all there is of it.
        assert apart(got, gradients) < 1e-9
        assert apart(kept, buffers) < 1e-12
