"""What is listed is what ranks send, where backward is not the forward in reverse: dead layers, whole gradients, loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp

S = mp.S


class Mixer(nn.Module):
    """Two projections; the second one's result goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.used(x).tanh()
        self.idle(h).square()
        return h


class Dead(nn.Module):
    """A mixer, a whole block of whose result nothing comes, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.lost, self.head = Mixer(), Mixer(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixer(x)
        self.lost(x)
        return self.head(x).square().mean()


class Late(nn.Module):
    """A unit whose only input needs no gradient: FSDP reduces it after the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Embedding(7, 4), nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.first(tokens).var(0, correction=0) * self.scale).tanh().mean()



def passes(model, plan: mp.Plan, world: int) -> None:
    found = mp.verify(model, plan, world, dtype=torch.float64)
    assert found.passed, str(found)
    assert any(c.name == "collectives" for c in found.checks)


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@pytest.mark.parametrize("recompute", [(), ("lost", "mixer")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=["fsdp", "fsdp x tp"])
def test_a_layer_that_nothing_comes_of(mesh, recompute, strategy):
    world = 2 * mesh.get("tp", 1)
    rules = [mp.Rule("{mixer,lost}.{used,idle}", use="colwise")] if "tp" in mesh else []
    plan = mp.Plan(
        mesh=mesh, inputs={"x": mp.Input((4, 6), torch.float64, {"dp": S(0)})}, rules=rules,
        fsdp=mp.Fsdp(units=["mixer", "lost"], strategy=strategy), recompute=mp.Recompute(units=recompute),
    )  # fmt: skip
    passes(Dead, plan, world)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("place", [{"dp": S(0)}, {}], ids=["rows", "whole"])
def test_gradients_that_are_whole_on_data_axes_are_averaged_all_the_same(mesh, place):
    plan = mp.Plan(
        mesh=mesh, inputs={"tokens": mp.Input((4, 5), torch.int64, place)},
        rules=[mp.Rule("first", use="embedding")] if "tp" in mesh else [], fsdp=mp.Fsdp(units=["first"]),
    )  # fmt: skip
    passes(Late, plan, 4 if "tp" in mesh else 2)


class Layer(nn.Module):
    """Adds what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s = nn.Linear(6, 6, bias=False), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x)) * self.s


class Loop(nn.Module):
    """Two layers, called in turn, several times over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        for _ in range(3):
            for layer in self.layers[1:]:
                x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=["fsdp", "fsdp x tp"])
def test_a_unit_that_is_called_again_is_reduced_once(mesh, strategy):
    # The gradient of a shard went into `p.grad` at each use of it, and FSDP2 reduced what it found after each call.
    rules = [mp.Rule("layers.*.a", use="colwise", output={"tp": mp.R})] if "tp" in mesh else []
    plan = mp.Plan(
        mesh=mesh, inputs={"x": mp.Input((4, 6), torch.float64, {"dp": S(0)})}, rules=rules,
        fsdp=mp.Fsdp(units=["layers.*"], strategy=strategy),
    )  # fmt: skip
    passes(Loop, plan, 2 * mesh.get("tp", 1))


class Fan(nn.Module):
    """One tensor, handed to a module that the plan moves it for and to equal ones that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rest = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        return torch.stack([self.first(x), *(layer(x) for layer in self.rest)]).square().mean()


def test_units_do_not_share_a_redistribution_of_what_they_are_handed():
    # FSDP2 hands each of its units a tensor of its own, so that each made the move and one was listed.
    moved = {"weight": {"tp": S(1)}}
    plan = mp.Plan(
        mesh={"dp_shard": 2, "tp": 2}, inputs={"x": mp.Input((4, 6, 8), torch.float64, {"dp": S(0)})},
        rules=[
            mp.Rule("first", input={"input": {"tp": S(2)}}, params=moved),
            mp.Rule("rest.*", params=moved, output={"tp": S(1)}),
        ],
        fsdp=mp.Fsdp(units=["rest.*"]),
    )  # fmt: skip
    passes(Fan, plan, 4)


class Again(nn.Module):
    """A split norm of a split norm: the second call's input is made from the parameters that both use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(self.up(x))).square().mean()


def test_an_operator_that_is_called_on_its_own_result_is_listed_once_a_call():
    rules = [mp.Rule("up", use="colwise"), mp.Rule("norm", params={"weight": {"tp": S(0)}, "bias": {"tp": S(0)}})]
    plan = mp.Plan(mesh={"tp": 2}, inputs={"x": mp.Input((4, 6), torch.float64)}, rules=rules)
    passes(Again, plan, 2)


class Scorer(nn.Module):
    """Picks positions without gradients, by a projection of what the model attends with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().sum(-1, keepdim=True)


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.score, self.after = nn.Linear(8, 8), Scorer(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = self.after(x)
        return (y * self.score(x)).square().mean()


def test_what_is_gathered_without_gradients_has_no_backward():
    # In the scorer's own code, where gradients are off, though what it is handed has one.
    rules = [
        mp.Rule("before", params={"weight": {"tp": S(0)}, "bias": {"tp": S(0)}}),
        mp.Rule("score.up", params={"weight": {"tp": S(0)}}),
        mp.Rule("after", params={"weight": {"tp": S(0)}, "bias": {"tp": S(0)}}),
    ]
    plan = mp.Plan(mesh={"tp": 2}, inputs={"x": mp.Input((4, 6, 8), torch.float64)}, rules=rules)
    passes(Picking, plan, 2)
