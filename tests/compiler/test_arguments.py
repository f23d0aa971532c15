"""Constants that a model makes at the size of its batch: each rank makes its own part, since all rows are equal."""

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align


class Positions(nn.Module):
    """ids [4, 6] -> 0-dim: positions repeated for each row, and a row shared by all with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(9, 8)
        self.start = nn.Parameter(torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        places = torch.arange(length).repeat(rows, 1)
        reversed_places = torch.arange(length).flip(0).unsqueeze(0).repeat(ids.size(0), 1)
        start = self.start.repeat(rows, length, 1) + self.start.expand_as(self.words(ids))
        return ((self.words(ids) + self.places(places) * self.places(reversed_places) + start) ** 2).mean()


def test_rows_repeated_for_a_rank_are_its_part_of_all_rows() -> None:
    ids = mp.Input(shape=(4, 6), dtype=torch.int64, place={"dp": mp.S(0)})
    for mesh in ({"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}):
        mp.lower(Positions(), mp.Plan(mesh=mesh, inputs={"ids": ids}), 2 * len(mesh))  # the value checks agree
        assert align(Positions(), mp.Plan(mesh=mesh, inputs={"ids": ids}), 2 * len(mesh)).distance < 1e-9


class Counted(nn.Module):
    """x [8, 4] -> 0-dim: divided by a number of rows that code reads off a shape and puts into a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).square()
        rows = y.shape[0]
        if self.how == "full":
            return y.sum() / torch.full((), rows)
        if self.how == "new_full":
            return y.sum() / y.new_full((), fill_value=rows)
        return (y.sum(1) / torch.full((rows,), float(rows))).sum()


@pytest.mark.parametrize("how", ["full", "new_full", "a row each"])
def test_a_tensor_filled_with_a_size_is_filled_with_that_of_the_whole(how) -> None:
    x = mp.Input(shape=(8, 4), dtype=torch.float32, place={"dp": mp.S(0)})
    assert align(Counted(how), mp.Plan(mesh={"dp_shard": 2}, inputs={"x": x}), 2).distance < 1e-9
