"""What a move costs is what its collectives send, forward and backward, by closed formulas."""

from __future__ import annotations

import pytest
import torch

from meshplan.compiler.kinds import I, P, R
from meshplan.cost.machine import Link
from meshplan.plan.placements import Shard
from meshplan.search.moves import move_cost

LINK = Link(4, 1e9, 1e-6)
BYTES = 6 * 8 * 4


def tensor(grad: bool = True) -> torch.Tensor:
    return torch.empty(6, 8, device="meta", requires_grad=grad)


@pytest.mark.parametrize(
    ("have", "want", "times", "calls"),
    [
        (Shard(1), R, 2, 2),  # all_gather, reduce_scatter
        (Shard(1), I, 1, 1),  # all_gather; its mate slices
        (P, I, 2, 1),  # all_reduce; its mate is the identity
        (P, R, 4, 2),
        (P, Shard(0), 2, 2),
        (I, R, 2, 1),  # the gradient is summed
        (I, Shard(1), 1, 1),  # a slice; the gradient is gathered
        (R, Shard(1), 0, 0),
        (R, I, 0, 0),
        (Shard(0), Shard(1), 2, 2),  # through the full value
    ],
)
def test_bytes_and_latency_of_a_move(have, want, times, calls):
    cost = move_cost(tensor(), have, want, LINK)
    assert cost.wire == times * BYTES * 3 / 4
    assert cost.latency == pytest.approx(calls * 1e-6)
    assert cost.seconds - cost.latency == pytest.approx(cost.wire / 1e9, abs=2e-9)


@pytest.mark.parametrize(
    ("have", "want", "times"), [(Shard(1), I, 1), (P, I, 2), (P, Shard(0), 1), (I, Shard(1), 0), (I, R, 0)]
)
def test_without_a_gradient_only_forward_counts(have, want, times):
    assert move_cost(tensor(False), have, want, LINK).wire == times * BYTES * 3 / 4


def test_what_is_not_done_costs_nothing_because_it_is_not_offered():
    assert move_cost(tensor(), Shard(0), I, LINK, param=True) is None  # sharded parameters are not gathered
    assert move_cost(tensor(), Shard(1, (4, 4)), I, LINK) is None
    assert move_cost(tensor(), I, P, LINK) is None
    assert move_cost(tensor(), I, Shard(0, None, 2), LINK) is None
    assert move_cost(torch.empty(3, 8, device="meta"), I, Shard(0), LINK) is None  # a rank would have nothing


def test_copies_give_up_all_but_their_own_share_for_nothing():
    t = torch.empty(8, 8, device="meta", requires_grad=True)
    assert move_cost(t, Shard(0, None, 2), Shard(0), LINK).wire == 0
