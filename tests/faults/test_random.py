"""Random numbers: initial values and dropout masks that no mesh changes, and draws that would differ between ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused
from tests.faults.test_uneven import PAIR, Mlp

pytestmark = pytest.mark.usefixtures("pool")


class Draws(nn.Module):
    """Random numbers in the middle of a forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.how = nn.Linear(4, 6), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        match self.how:
            case "noise":
                h = h + torch.randn_like(h)
            case "bernoulli":
                h = h * torch.bernoulli(torch.full_like(h, 0.5))
            case "in place":
                h = h + torch.empty(h.shape, dtype=h.dtype).normal_()
            case "permutation":
                h = h[torch.randperm(h.shape[0])]
            case "alpha":
                h = nn.functional.alpha_dropout(h, 0.5, training=True)
        return h.square().sum()


class Dropping(nn.Module):
    """Dropout on a split activation, on a whole one and on attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 10), nn.Linear(10, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.drop(torch.tanh(self.up(x)))).view(*x.shape[:2], 4, 2).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.25)
        return nn.functional.dropout(out, 0.4, self.training).square().sum()


@pytest.mark.parametrize("how", ["noise", "bernoulli", "in place", "permutation", "alpha"])
def test_a_draw_from_the_default_generator_is_refused(how):
    # Every rank would draw its own numbers, or all the same ones for different shards.
    error = refused(partial(Draws, how), plan_of({"x": numbers(3, 4)}, mp.Rule("up", use="colwise")), "random-op")
    assert error.where.file == __file__ and error.where.line


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_dropout_masks_are_one_devices_on_any_mesh(mesh):
    # torchtitan#3106: stock masks of two CPU shards are bit-identical.
    world = 2 * len(mesh)
    exact(
        Dropping,
        plan_of({"x": numbers(4, 3, 8, dp=mp.S(0))}, *(PAIR if "tp" in mesh else ()), mesh=mesh),
        world,
        steps=2,
    )


def initial(mesh: dict[str, int]) -> list[Tensor]:
    """On a rank: the gathered initial values of a model built on meta and seeded with 0."""
    model = mp.meta(lambda: Mlp(hidden=7))
    fsdp = mp.Fsdp(units=["up", "down"]) if "dp_shard" in mesh else None
    rules = PAIR if mesh.get("tp", 1) > 1 else ()
    model = mp.parallelize(model, plan_of({"x": numbers(4, 8, dp=mp.S(0))}, *rules, mesh=mesh, fsdp=fsdp))
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def test_initial_values_are_one_devices_on_any_mesh(pool):
    # pytorch#168058: the same seed under S(0), S(1), tp 1, 2 and 4; the halves of a split differ from each other.
    alone = pool.run(initial, {"tp": 1}, world=1)[0]
    assert not torch.equal(alone[0][:4], alone[0][3:])
    for mesh, world in (({"tp": 2}, 2), ({"tp": 4}, 4), ({"dp_shard": 2, "tp": 2}, 4), ({"dp_shard": 4}, 4)):
        for values in pool.run(initial, mesh, world=world):
            assert all(torch.equal(a, b) for a, b in zip(values, alone, strict=True)), mesh
