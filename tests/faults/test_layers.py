"""Layers other than linear ones: convolutions, norms over groups and batches, embeddings, tokens expanded over the batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, ids, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")


class Layers(nn.Module):
    """Layers in a row on an image of 4 channels, and the sum of squares."""

    def __init__(self, *layers: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


LAYERS = {
    "conv k4 s4": lambda: nn.Conv2d(4, 6, 4, 4),
    "conv k7 s2 p3": lambda: nn.Conv2d(4, 6, 7, 2, 3),
    "conv 1x1": lambda: nn.Conv2d(6, 4, 1),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm 6": lambda: nn.GroupNorm(3, 6),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "relu": nn.ReLU,
    "pool": lambda: nn.AvgPool2d(2),
    "max pool": lambda: nn.MaxPool2d(2),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d(2),
    "upsample": lambda: nn.Upsample(scale_factor=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 2, 2),
}

STACKS = [
    ("conv k4 s4",), ("conv k7 s2 p3", "relu", "conv 1x1"), ("group norm", "conv k4 s4"), ("depthwise", "group norm", "relu"),
    ("pool", "conv k4 s4"), ("max pool", "conv k4 s4"), ("adaptive pool",), ("conv k7 s2 p3", "upsample"), ("transposed",),
]  # fmt: skip


@pytest.mark.parametrize("layers", STACKS, ids=" ".join)
def test_a_split_batch_of_images(layers):
    # pytorch#176446 and #184825: batch splits that spatial rules, or missing ones, refused. A layer without parameters has one
    # in front, so that there is something to differentiate.
    names = layers if layers != ("adaptive pool",) else ("conv k7 s2 p3", "adaptive pool")
    exact(partial(Layers, *names), plan_of({"x": numbers(4, 4, 8, 8, dp=mp.S(0))}, mesh={"dp_shard": 2}))


@pytest.mark.parametrize("middle", ["relu", "group norm 6", "max pool"])
def test_convolutions_split_by_channels(middle):
    rules = (
        mp.Rule("layers.0", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}),
        mp.Rule("layers.2", params={"weight": {"tp": mp.S(1)}}),
    )
    exact(partial(Layers, "conv k7 s2 p3", middle, "conv 1x1"), plan_of({"x": numbers(2, 4, 8, 8)}, *rules))


@pytest.mark.parametrize("layers", [("conv k4 s4",), ("conv k7 s2 p3", "relu")], ids=" ".join)
def test_an_image_split_by_width_is_exact(layers):
    # pytorch#191926: a gradient labelled as split by batch.
    exact(partial(Layers, *layers), plan_of({"x": numbers(2, 4, 8, 8, dp=mp.S(3))}, mesh={"dp_shard": 2}))


def test_a_batch_norm_sees_the_statistics_of_the_global_batch():
    plan = plan_of({"x": numbers(4, 4, 8, 8, dp=mp.S(0))}, mesh={"dp_shard": 2})
    exact(partial(Layers, "batch norm", "conv k4 s4"), plan)


class Tables(nn.Module):
    """Two vocabulary-split tables used together, of other sizes, one with a padding row."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Embedding(rows, 4), nn.Embedding(5, 6, padding_idx=2), nn.Linear(10, 3)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        return self.out(torch.cat([self.a(tokens), self.b(kinds % 5)], -1)).square().sum()


@pytest.mark.parametrize("rows", [8, 7])
def test_two_vocabulary_split_tables_do_not_share_masks(rows):
    # pytorch#131264.
    exact(partial(Tables, rows), plan_of({"tokens": ids(3, 4), "kinds": ids(3, 4)}, mp.Rule("{a,b}", use="embedding")))


def padding_row() -> float:
    model = mp.meta(Tables)
    plan = plan_of({"tokens": ids(3, 4), "kinds": ids(3, 4)}, mp.Rule("{a,b}", use="embedding"))
    weight = mp.parallelize(model, plan).b.weight.full_tensor()
    return weight[2].abs().max().item() if weight[[0, 1, 3, 4]].abs().min() > 0 else -1.0


def test_the_padding_row_of_a_split_table_is_zero_on_its_owner(pool):
    # Automodel#1675.
    assert pool.run(padding_row, world=2) == [0.0, 0.0]


class ClassToken(nn.Module):
    """A learned token expanded over the batch, and positions added to every row."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 6)), nn.Parameter(torch.zeros(1, 4, 6))
        self.up = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.up(x).square().mean()


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}])
def test_a_learned_token_expanded_over_the_batch(mesh):
    rules = [mp.Rule("up", use="colwise")] if "tp" in mesh else []
    exact(ClassToken, plan_of({"x": numbers(4, 3, 6, dp=mp.S(0))}, *rules, mesh=mesh))


def test_a_spatial_split_of_a_convolution_that_no_rank_can_do_alone_is_listed():
    low = mp.lower(
        Layers("conv k7 s2 p3").double(), plan_of({"x": numbers(2, 4, 8, 8, dp=mp.S(3))}, mesh={"dp_shard": 2}), 2
    )
    assert [c.op for c in low.collectives if c.phase == "forward"] == ["all_gather"]


def test_a_weight_split_along_its_kernel_is_gathered_and_the_plan_is_told_so():
    plan = plan_of({"x": numbers(2, 4, 8, 8)}, mp.Rule("layers.0", params={"weight": {"tp": mp.S(2)}}))
    exact(partial(Layers, "depthwise"), plan)
    (gathered,) = [c for c in mp.lower(Layers("depthwise").double(), plan, 2).collectives if c.op == "all_gather"]
    assert gathered.module == "layers.0" and gathered.elements == 4 * 1 * 4 * 3  # 3 rows are padded to 4


def compiled_tables(rows: int) -> list[float]:
    """On a rank: how far three calls of a compiled model with two split tables are from one device."""
    torch.manual_seed(0)
    model = Tables(rows).double()
    calls = [(torch.arange(12).view(3, 4) * k % rows, torch.arange(12).view(3, 4) * (k + 1)) for k in (1, 3, 5)]
    want = [model(*call).item() for call in calls]
    rules = (mp.Rule("{a,b}", use="embedding"),)
    compiled = mp.Compile(units=["a", "b"], backend="aot_eager")
    plan = plan_of({"tokens": ids(3, 4), "kinds": ids(3, 4)}, *rules, compile=compiled)
    mp.parallelize(model, plan)
    return [model(*call).item() - value for call, value in zip(calls, want, strict=True)]


def test_split_tables_of_a_compiled_model_mask_each_call_anew(pool):
    # pytorch#185356: the mask of an earlier call was kept as metadata.
    assert max(abs(x) for found in pool.run(compiled_tables, 7, world=2) for x in found) < 1e-12
