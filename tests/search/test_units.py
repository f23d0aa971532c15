"""FSDP units of derived plans: the repeated blocks; what several of them hold belongs to the root."""

from __future__ import annotations

import torch
from torch import nn

import meshplan as mp
from meshplan.search.units import units_of


class Own(nn.Module):
    """Four layers, two of which also run one and the same module, as Zamba2's hybrid layers do."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(shared if i in (1, 3) else None) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self, shared: nn.Module | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).tanh()) * self.scale
        return x if self.shared is None else x + self.shared(x)


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 4 * 6).reshape(4, 6)}


def test_blocks_are_units_and_what_two_of_them_hold_is_the_roots() -> None:
    model = Own()
    assert units_of(model, dict(model.named_modules())) == ["layers.{0,2}", "layers.{1,3}.up", "layers.{1,3}.down"]
    apart = nn.ModuleDict({"layers": nn.ModuleList(Layer(None) for _ in range(3))})
    assert units_of(apart, dict(apart.named_modules())) == ["layers.*"]


def test_a_plan_of_blocks_that_share_a_module_is_exact(pool) -> None:
    plan = mp.auto_plan(Own(), {"dp_shard": 2}, batch())
    receipt = mp.verify(Own, plan, nproc=2, inputs=batch())
    assert receipt.passed, str(receipt)
    low = mp.lower(Own(), plan, 2, batch())
    sent = [c.elements for c in low.collectives if c.op == "reduce_scatter"]
    assert sum(sent) == sum(p.numel() for p in Own().parameters())  # each parameter's gradient once, shared ones too
