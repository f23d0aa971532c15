"""The cheapest strategy wins; what may not move does not."""

from __future__ import annotations

import torch

from meshplan.compiler.kinds import I, N, P, R
from meshplan.compiler.match import choose
from meshplan.compiler.rules.base import REP, Strategy
from meshplan.plan.placements import Shard


def value(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.zeros(*shape, requires_grad=grad)


COLUMN = Strategy((REP, Shard(0)), (Shard(1),))
ROW = Strategy((Shard(1), Shard(1)), (P,))
WHOLE = Strategy((REP, REP), (REP,))


def test_what_is_at_hand_costs_nothing():
    found = choose([WHOLE, COLUMN, ROW], [R, Shard(0)], [value(4, 6), value(8, 6)], [False, True], 2)
    assert found is not None and found.strategy is COLUMN and found.cost == 0 and found.wanted == (None, None)


def test_a_sharded_parameter_is_gathered_only_where_nothing_else_can_be_done():
    held, tensors = [Shard(0), Shard(1)], [value(4000, 6), value(8, 6)]
    found = choose([WHOLE, ROW], held, tensors, [False, True], 2)
    assert found is not None and found.strategy is ROW and found.wanted == (Shard(1), None)
    found = choose([WHOLE], held, tensors, [False, True], 2)
    assert found is not None and found.wanted == (REP, REP)


def test_what_is_written_into_is_not_redistributed_if_it_can_be_helped():
    alike = Strategy((Shard(0), Shard(0)), (Shard(0),))
    for written, way in ((False, alike), (True, WHOLE)):
        found = choose([alike, WHOLE], [N, Shard(0)], [value(4, grad=False), value(4)], [False, False], 2, written)
        assert found is not None and found.strategy is way


def test_what_meets_a_dim_of_fused_parts_is_cut_part_by_part():
    alike = Strategy((Shard(0), Shard(0)), (Shard(0),))
    found = choose([alike], [Shard(0, (4, 2)), R], [value(6), value(6)], [False, False], 2)
    assert found is not None and found.wanted == (None, Shard(0, (4, 2))) and found.outs == (Shard(0, (4, 2)),)


def test_an_activation_is_cut_for_a_row_split_weight():
    found = choose([WHOLE, COLUMN, ROW], [N, Shard(1)], [value(4, 6, grad=False), value(8, 6)], [False, True], 2)
    assert found is not None and found.strategy is ROW and found.wanted == (Shard(1), None)


def test_a_whole_activation_does_not_become_a_summand():
    both = Strategy((P, P), (P,))
    found = choose([both, WHOLE], [P, I], [value(2), value(2)], [False, False], 2)
    assert found is not None and found.strategy is WHOLE


def test_a_bias_does():
    both = Strategy((P, P), (P,))
    found = choose([both, WHOLE], [P, I], [value(2), value(2)], [False, True], 2)
    assert found is not None and found.strategy is both and found.wanted == (None, P)


def test_parts_go_through_what_keeps_the_dim_and_stop_at_what_does_not():
    fused = Shard(0, (4, 2, 2))
    through = choose([COLUMN], [R, fused], [value(3, 6), value(8, 6)], [False, True], 2)
    assert through is not None and through.outs == (Shard(1, (4, 2, 2)),)
    plain = Strategy((Shard(1),), (Shard(1),), plain=True)
    stopped = choose([plain], [Shard(1, (4, 4))], [value(3, 8)], [False], 2)
    assert stopped is not None and stopped.wanted == (Shard(1),)


def test_copies_go_through_and_are_given_up_beside_plain_shards():
    few = Shard(0, None, 2)
    alone = choose([Strategy((Shard(0), REP), (Shard(0),))], [few, R], [value(8), value(8)], [False, False], 4)
    assert alone is not None and alone.outs == (few,) and alone.wanted == (None, None)
    both = choose(
        [Strategy((Shard(0), Shard(0)), (Shard(0),))], [few, Shard(0)], [value(8), value(8)], [False, False], 4
    )
    assert both is not None and both.wanted == (Shard(0), None) and both.outs == (Shard(0),)
    summed = choose([Strategy((Shard(0),), (P,))], [few], [value(8)], [False], 4)
    assert summed is not None and summed.wanted == (Shard(0),)  # copies would be counted twice
