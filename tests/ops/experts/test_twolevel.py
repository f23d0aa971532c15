"""Node-first dispatch: one device's numbers, a token across to a node once, every call announced, bytes by level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.experts.cost import Routed, Sent, collectives, expression, sends
from meshplan.ops.experts.experts import routed_experts
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives
from meshplan.runtime.simulated import World
from tests.ops.experts.reference import ROUTINGS, Case, H, check, gloo_levels, indices, on_rank, simulated
from tests.ops.experts.test_cost import DTYPE, WEIGHTS, Line, Logged, _bare, rows_of, run, teller

TWO: dict[str, Any] = {"dispatch": "twolevel", "nodes": 2}
WAYS = {"dedup": TWO | {"dedup": True}, "plain": TWO}
UNEVEN = (3, 0, 6, 2)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_are_one_device(way, routing):
    for k in (1, 2, 5):
        case = Case(UNEVEN, k=k, routing=routing)
        check(case, simulated(case, WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nodes, tokens", [(3, (2, 5, 1, 0, 0, 4)), (2, (2, 5, 1, 0, 0, 4)), (1, (3, 1)), (2, (3, 1))])
def test_other_nodes(nodes, tokens, way):
    """Three nodes of two, two of three, and those where one of the levels is none."""
    case = Case(tokens, experts=12, k=4)
    check(case, simulated(case, WAYS[way] | {"nodes": nodes}))


GLOO = [
    (Case(UNEVEN, k=3), "dedup"),
    (Case(UNEVEN, k=2, routing="same"), "plain"),
    (Case((0, 0, 1, 0), experts=4, k=2), "dedup"),
    (Case((0, 0, 0, 0), experts=4), "plain"),
    (Case(UNEVEN, k=8, routing="holes"), "plain"),
]


def _options(way: str, levels: tuple[AxisGroup, AxisGroup]) -> dict[str, Any]:
    return {"dispatch": "twolevel", "dedup": way == "dedup", "levels": levels}


def _on_gloo() -> list[dict[str, Tensor]]:
    group = AxisGroup("ep", 4, dist.get_rank(), dist.group.WORLD.group_name)  # type: ignore[union-attr]
    levels = gloo_levels(2)
    return [on_rank(case, group, _options(way, levels)) for case, way in GLOO]


def test_gloo_ranks_are_one_device(pool):
    ranks = pool.run(_on_gloo)
    for i, (case, _) in enumerate(GLOO):
        check(case, [r[i] for r in ranks])


CASES = [
    Case(UNEVEN, k=2, routing="one"),
    Case(UNEVEN, k=3, routing="same"),
    Case((5, 5, 5, 5), k=4, routing="holes"),
    Case((0, 0, 1, 0), k=1),
]


def said(way: str, x: Routed, group: AxisGroup, levels: tuple[AxisGroup, AxisGroup], **options: Any) -> list[Line]:
    return [
        (phase, call.op, call.elements, _bare(call.dtype))
        for phase in ("forward", "backward")
        for call in collectives("twolevel", x, group, phase=phase, levels=levels, dedup=way == "dedup", **options)
    ]


@pytest.mark.parametrize("frozen", ["", "tokens", "weights"])
@pytest.mark.parametrize("way", WAYS)
def test_simulated_ranks_make_the_calls_that_are_announced(way, frozen):
    for case in CASES:
        routed = Routed.of(rows_of(case), case.experts, H, DTYPE, WEIGHTS, nodes=2)
        world = World(4)

        def work(rank: int) -> bool:
            log: list[Line] = []
            make = lambda axis, n, at, members: Logged(axis, n, at, world=world, key=members, log=log)  # noqa: E731
            group = make("ep", 4, rank, "ep")
            levels = make("ep_out", 2, rank // 2, ("out", rank % 2)), make("ep_in", 2, rank % 2, ("in", rank // 2))
            run(rows_of(case)[rank], case.experts, group, _options(way, levels), frozen)
            wanted = {f"{name}_grad": name != frozen for name in ("tokens", "weights")}
            assert log == said(way, routed, group, levels, **wanted)
            return True

        assert all(world.run(work))


def _recorded() -> list[tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]]:
    """With the bytes that leave the rank."""
    found = []
    group = AxisGroup("ep", 4, dist.get_rank(), dist.group.WORLD.group_name)  # type: ignore[union-attr]
    levels = gloo_levels(2)
    for way in WAYS:
        for case in CASES[:2]:
            with record_collectives() as log:
                run(rows_of(case)[group.rank], case.experts, group, _options(way, levels))
            x = Routed.of(rows_of(case), case.experts, H, DTYPE, WEIGHTS, nodes=2)
            announced = [
                (phase, sent.call.op, sent.call.elements, _bare(sent.call.dtype), sent.bytes)
                for phase in ("forward", "backward")
                for sent in sends("twolevel", x, group, phase=phase, levels=levels, dedup=way == "dedup")
            ]
            found.append(([(c.phase, c.op, c.elements, c.dtype, c.wire_bytes) for c in log], announced))
    return found


def test_gloo_ranks_make_them_too_and_send_no_byte_more(pool):
    for rank in pool.run(_recorded):
        for made, announced in rank:
            assert made == announced


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens, k, experts", [(6, 2, 8), (7, 3, 4), (0, 1, 4), (64, 8, 32)])
def test_shape_only_ranks_are_told_the_calls_of_even_routing(way, tokens, k, experts):
    for rank in (0, 3):
        lines: list[Line] = []
        on_call = teller(lines)
        group = AxisGroup("ep", 4, rank, on_call=on_call)
        levels = AxisGroup("ep_out", 2, rank // 2, on_call=on_call), AxisGroup("ep_in", 2, rank % 2, on_call=on_call)
        with compat.fake_tensor_mode():
            run(torch.zeros(tokens, k, dtype=torch.int64), experts, group, _options(way, levels))
        even = Routed.even(tokens, k, experts, 4, rank, H, DTYPE, WEIGHTS, nodes=2)
        assert lines == said(way, even, group, levels)


def test_a_token_for_two_ranks_of_a_node_crosses_to_it_once():
    """Two nodes of two. Rank 0's three tokens go to both ranks of node 1, whose gradient has to come back once as well."""
    chosen = [torch.tensor([[2, 3]] * 3), *[torch.empty(0, 2, dtype=torch.int64)] * 3]
    routed = Routed.of(chosen, 4, H, DTYPE, WEIGHTS, nodes=2)
    group, outer, inner = AxisGroup("ep", 4, 0), AxisGroup("ep_out", 2, 0), AxisGroup("ep_in", 2, 0)
    sent = sends("twolevel", routed, group, levels=(outer, inner))
    rows = [s.leave for s in sent if s.call.axis == "ep_out" and s.call.dtype == DTYPE]
    assert rows == [3 * H, 0]  # there, and nothing came that has to go home
    flat = [s.leave for s in sends("dedup", routed, group) if s.call.dtype == DTYPE]
    assert flat == [6 * H, 0]
    # Rank 2, at rank 0's place in node 1, deals out three rows to its neighbour and keeps three.
    levels = AxisGroup("ep_out", 2, 1), AxisGroup("ep_in", 2, 0)
    sent = sends("twolevel", routed, AxisGroup("ep", 4, 2), levels=levels)
    dealt = [s for s in sent if s.call.axis == "ep_in" and s.call.dtype == DTYPE]
    assert [(s.call.elements, s.leave) for s in dealt] == [(6 * H, 3 * H), (3 * H, 0)]


def _rows(sent: list[Sent], axis: str) -> int:
    return sum(s.bytes for s in sent if s.call.axis == axis and s.call.dtype == torch.bfloat16)


def test_bytes_are_those_of_the_formulas():
    """8 ranks in 2 nodes, top 2 of 8 experts. Every pair of experts, equal ones too, is chosen by one token of each rank: counts
    are then the means of choices drawn alike."""
    pairs = torch.tensor([(a, b) for a in range(8) for b in range(8)])
    routed = Routed.of([pairs] * 8, 8, 100, torch.bfloat16, torch.float32, nodes=2)
    numbers = {"T": 64, "k": 2, "H": 100, "b": 2, "W": 8, "O": 2, "I": 4, "i": 1}
    for rank in range(8):
        group = AxisGroup("ep", 8, rank)
        levels = AxisGroup("ep_out", 2, rank // 4), AxisGroup("ep_in", 4, rank % 4)
        for phase in ("forward", "backward"):
            sent = sends("twolevel", routed, group, levels=levels, phase=phase)
            assert _rows(sent, "ep_out") == float(expression("across").subs(numbers))
            assert _rows(sent, "ep_in") == float(expression("inside").subs(numbers))
            sent = sends("twolevel", routed, group, levels=levels, phase=phase, dedup=False)
            assert _rows(sent, "ep_in") == float(expression("inside plain").subs(numbers))
    assert expression("twolevel").subs(numbers) == sum(expression(e).subs(numbers) for e in ("across", "inside"))


def test_an_index_without_an_expert_is_refused_by_all_ranks_together():
    """One rank of four has it; the two that it never sends to have to raise too."""
    for way in WAYS.values():

        def work(case: Case, group: AxisGroup, options: dict[str, Any]) -> str:
            chosen = torch.tensor([[0], [8 if group.rank == 1 else 7]])
            with pytest.raises(PlanError) as refusal:
                routed_experts(
                    torch.ones(2, 3), chosen, torch.ones(2, 1), lambda x, _: x, experts=8, group=group, **options
                )
            return refusal.value.code

        assert simulated(Case(UNEVEN), way, work) == ["expert-index"] * 4


def test_levels_that_are_not_the_nodes_of_the_group_are_refused():
    good = (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    group, two = AxisGroup("ep", 8, 3), AxisGroup("ep_out", 2, 0)
    bad = [
        ("experts-levels", {"dispatch": "twolevel", "levels": (two, AxisGroup("ep_in", 2, 1))}),
        ("experts-levels", {"dispatch": "twolevel", "levels": (AxisGroup("ep_out", 2, 1), AxisGroup("ep_in", 4, 3))}),
        ("bad-value", {"dispatch": "twolevel"}),
        ("bad-value", {"levels": (two, AxisGroup("ep_in", 4, 3))}),
    ]
    for code, options in bad:
        with pytest.raises(PlanError) as refusal:
            routed_experts(*good, lambda x, _: x, experts=8, group=group, **options)
        assert refusal.value.code == code
    routed = Routed.even(4, 2, 8, 8, 3, 5, DTYPE, WEIGHTS)
    with pytest.raises(PlanError) as refusal:
        sends("twolevel", routed, group)
    assert refusal.value.code == "bad-value"


def test_reruns_are_the_same_bit_by_bit():
    first, second = (simulated(Case(UNEVEN, k=4), TWO) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_indices_may_be_any_integers():
    chosen = indices(Case(UNEVEN)).int()

    def work(case: Case, group: AxisGroup, options: dict[str, Any]) -> Tensor:
        mine = chosen.split(list(case.tokens))[group.rank]
        x = torch.ones(len(mine), 2, dtype=torch.bfloat16)
        return routed_experts(x, mine, torch.ones(mine.shape), lambda x, _: x, experts=8, group=group, **options)

    for out, size in zip(simulated(Case(UNEVEN), TWO, work), UNEVEN, strict=True):
        assert torch.equal(out, torch.full((size, 2), 2.0, dtype=torch.bfloat16))
