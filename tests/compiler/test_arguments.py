"""Constants that a model makes at the size of its batch: each rank makes its own part, since all rows are equal."""

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
