"""Moves over an axis whose gradients are averaged keep a rank's share of a gradient times the number of ranks."""

import pytest
import torch

from meshplan.runtime.boundary import MOVES, halves, move
from meshplan.runtime.comm import AxisGroup


def group(axis, rank=0, ranks=2):
    return AxisGroup(axis, ranks, rank)


@pytest.mark.parametrize(
    ("axis", "averages"), [("tp", False), ("dp_shard", True), ("dp_shard+cp", True), ("tp_kv", False)]
)
def test_data_axes_average(axis, averages):
    assert group(axis).averages is averages


@pytest.mark.parametrize(
    ("src", "dst", "tp", "dp"),
    [
        ("R", "I", 1.0, 2.0),  # rank 0 alone adds the whole gradient g; the mean over 2 ranks needs 2 g
        ("P", "I", 1.0, 2.0),  # every summand's gradient is g, kept times 2
        ("A", "I", 0.5, 1.0),  # every rank's mean has g / 2, kept times 2
        ("I", "P", 1.0, 0.5),
        ("P", "A", 2.0, 2.0),  # both are shares: nothing changes between them
        ("R", "P", 1.0, 1.0),
    ],
)
def test_the_gradient_of_a_move_on_the_first_rank(src, dst, tp, dp):
    for axis, want in (("tp", tp), ("dp_shard", dp)):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        move(x, src, dst, group(axis)).backward(torch.ones(3, dtype=torch.float64))
        assert x.grad.tolist() == [want] * 3, axis


def test_a_gathered_whole_value_hands_back_its_slice_times_the_ranks():
    x = torch.ones(2, requires_grad=True)
    move(x, "S", "I", group("dp_shard", rank=1), 0, 4).backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert x.grad.tolist() == [6.0, 8.0]


def test_a_frozen_value_becomes_a_summand_without_recording():
    x = torch.ones(2)
    assert move(x, "N", "P", group("tp", rank=1)).tolist() == [0.0, 0.0]
    assert move(x, "N", "P", group("tp", rank=0)).grad_fn is None


@pytest.mark.parametrize(("src", "dst"), MOVES)
def test_only_moves_into_and_out_of_i_are_scaled(src, dst):
    same = halves(src, dst, group("dp_shard"))[1] is MOVES[src, dst][1]
    assert same is ((src == "I") == (dst == "I"))
