"""One row a rank: code that widens a table only for more rows than one runs the same program on a rank that has one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align

S = mp.S


class Placed(nn.Module):
    """Widens positions to the batch where they are not as wide, as transformers does, and goes on with both."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.embed, self.place, self.times = nn.Embedding(11, 6), nn.Embedding(9, 6), times

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        row = (torch.arange(tokens.shape[1]) * 2 % 9).unsqueeze(0)
        wide = row
        for _ in range(self.times):
            if wide.shape[0] != x.shape[0]:
                wide = wide.expand(x.shape[0], -1)
        packed = (wide.diff(dim=1, prepend=wide[:, :1]) < 0).cumsum(1)
        x = x + self.place(row) * (1 + packed).unsqueeze(-1) + torch.arange(6)  # a constant after what was left out
        return (x * self.place(wide)).pow(2).sum()


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_a_rank_with_one_row_leaves_the_widening_out(mesh):
    world = torch.Size(mesh.values()).numel()
    rows = world // mesh.get("tp", 1)
    rules = [mp.Rule("embed", params={"weight": {"tp": S(1)}})] if "tp" in mesh else []
    tokens = mp.Input(shape=(rows, 7), dtype=torch.int64, place={"dp": S(0)})
    given = mp.Plan(mesh=mesh, inputs={"tokens": tokens}, rules=rules)
    low = mp.lower(Placed(), given, world)
    assert [low.core.program.spared != (), len(low.core.program.spared)] == [True, 1]
    assert align(Placed().double(), given, world).distance < 1e-12


def test_on_ranks(pool):
    given = mp.Plan(
        mesh={"dp_shard": 2, "tp": 2},
        inputs={"tokens": mp.Input(shape=(2, 7), dtype=torch.int64, place={"dp": S(0)})},
        rules=[mp.Rule("embed", params={"weight": {"tp": S(0)}})],
    )
    receipt = mp.verify(Placed, given, nproc=4)
    assert receipt.passed, str(receipt)


def test_with_more_rows_than_one_nothing_is_left_out():
    tokens = mp.Input(shape=(4, 7), dtype=torch.int64, place={"dp": S(0)})
    low = mp.lower(Placed(), mp.Plan(mesh={"dp_shard": 2}, inputs={"tokens": tokens}), 2)
    assert low.core.program.spared == ()


class Branches(Placed):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return (x.expand(4, *x.shape[1:]) * 2 if x.shape[0] != 1 else x).pow(2).sum()


def test_another_program_for_one_row_is_refused():
    tokens = mp.Input(shape=(4, 7), dtype=torch.int64, place={"dp": S(0)})
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(Branches(), mp.Plan(mesh={"dp_shard": 4}, inputs={"tokens": tokens}), 4)
    assert caught.value.code == "diverged"


class Learned(nn.Module):
    """Widens a parameter, whose gradient is then a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 6), nn.Parameter(torch.randn(1, 7, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        x, place = self.embed(tokens), self.place
        if place.shape[0] != x.shape[0]:
            place = place.expand(x.shape[0], -1, -1)
        return (x * place).pow(2).sum()


def test_what_has_a_gradient_is_not_left_out():
    tokens = mp.Input(shape=(2, 7), dtype=torch.int64, place={"dp": S(0)})
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(Learned(), mp.Plan(mesh={"dp_shard": 2}, inputs={"tokens": tokens}), 2)
    assert caught.value.code == "diverged"
