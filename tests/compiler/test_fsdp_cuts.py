"""Which dim FSDP cuts, and what it leaves whole because another axis holds the only dim."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshplan as mp
from meshplan.compiler.fsdp_cuts import fsdp_cuts, kept_whole
from meshplan.errors import PlanError

S = mp.S


class Fused(nn.Module):
    """A fused projection `a|b` of 2 x 8 rows from `width` columns, a scalar, and a head of 7 rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ab, self.head = nn.Linear(width, 16), nn.Linear(8, 7)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.ab(x).split(8, -1)
        return self.head(a * b * self.scale)


def _core(width: int = 8, **fsdp):
    fused = {"tp": S(0, parts=(8, 8))}
    plan = mp.Plan(
        mesh={"dp_shard": 4, "tp": 2},
        inputs={"x": mp.Input(shape=(8, width), dtype=torch.float32, place={"dp": S(0)})},
        rules=[
            mp.Rule("ab", params={"weight": fused, "bias": fused}),
            mp.Rule("head", params={"weight": {"tp": S(0)}, "bias": {"tp": S(0)}}),
        ],
        fsdp=mp.Fsdp(units=[], **fsdp),
    )
    return mp.lower(Fused(width), plan, world_size=8).core


def test_dims_split_part_by_part_or_unevenly_are_not_cut_and_vectors_of_them_stay_whole():
    core = _core()
    # ab.weight [16, 8] is split part by part on dim 0, head.weight [7, 8] unevenly: 4 ranks cut their other dim.
    assert fsdp_cuts(core) == {"ab.weight": 1, "ab.bias": None, "head.weight": 1, "head.bias": None, "scale": None}
    assert kept_whole(core) == {"ab.bias", "head.bias", "scale"}


def test_a_matrix_without_a_dim_to_cut_is_refused():
    with pytest.raises(PlanError, match=r"ab.weight \[16, 6\] has no dim that fsdp could cut over 4 ranks") as caught:
        _core(width=6)
    assert caught.value.code == "fsdp-no-dim" and caught.value.module == "ab"


def test_asking_for_the_dim_of_the_parts_is_refused_with_the_dim_that_works():
    with pytest.raises(PlanError, match=r"cuts dim 0 of ab\.weight, which tp splits") as caught:
        _core(shard_dims={"ab.weight": 0})
    assert caught.value.code == "fsdp-no-dim" and "{ab.weight: 1}" in str(caught.value)


def test_without_fsdp_nothing_is_cut():
    plan = mp.Plan(
        mesh={"dp_replicate": 2}, inputs={"x": mp.Input(shape=(8, 5), dtype=torch.float32, place={"dp": S(0)})}
    )
    assert fsdp_cuts(mp.lower(Fused(5), plan, world_size=2).core) == {}
