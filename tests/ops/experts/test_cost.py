"""What a dispatch is said to send is what it makes every rank send, one by one: told, simulated, and on gloo ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.experts.contract import Even
from meshplan.ops.experts.cost import Routed, bytes_sent, collectives, expression, sends
from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.load import load_table
from meshplan.runtime.comm import UNEVEN, AxisGroup, OnCall
from meshplan.runtime.recorder import record_collectives
from meshplan.runtime.simulated import SimulatedGroup, World
from tests.ops.experts.reference import Case, H, indices

OPTIONS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dedup": {"dedup": True},
    "allgather": {"dispatch": "allgather"},
}
DTYPE, WEIGHTS = torch.float32, torch.float64
CASES = [
    Case((3, 0, 6, 2), k=2, routing="one"),
    Case((3, 0, 6, 2), k=3, routing="same"),
    Case((5, 5, 5, 5), k=4, routing="holes"),
    Case((0, 0, 1, 0), k=1),
]

Line = tuple[str, str, int, str]  # phase, op, elements, dtype


def _bare(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _phase() -> str:
    return "backward" if compat.in_backward() else "forward"


def rows_of(case: Case) -> list[Tensor]:
    return list(indices(case).split(list(case.tokens)))


def run(chosen: Tensor, experts: int, group: AxisGroup, options: dict[str, Any], frozen: str = "") -> None:
    x = torch.ones(chosen.shape[0], H, dtype=DTYPE, requires_grad=frozen != "tokens")
    weights = torch.ones(chosen.shape, dtype=WEIGHTS, requires_grad=frozen != "weights")
    w = torch.ones((), dtype=DTYPE, requires_grad=True)
    out = routed_experts(x, chosen, weights, lambda x, _: w * x, experts=experts, group=group, **options)
    out.backward(torch.ones_like(out))


def said(method: str, routed: Routed, group: AxisGroup, **options: Any) -> list[Line]:
    return [
        (phase, call.op, call.elements, _bare(call.dtype))
        for phase in ("forward", "backward")
        for call in collectives(method, routed, group, phase=phase, **options)
    ]


def teller(lines: list[Line]) -> OnCall:
    """Writes down what abstract groups tell."""
    return lambda op, group, x: lines.append((_phase(), op.removesuffix(UNEVEN), x.numel(), _bare(x.dtype)))


@dataclasses.dataclass(frozen=True)
class Logged(SimulatedGroup):
    """A simulated group that writes down what it is asked for, as a real one's recorder does."""

    log: list[Line] = dataclasses.field(default_factory=list, compare=False)

    def _line(self, op: str, x: Tensor, times: int = 1) -> None:
        if self.size > 1:
            self.log.append((_phase(), op, x.numel() * times, _bare(x.dtype)))

    def all_gather(self, x: Tensor, dim: int, size: int | None = None) -> Tensor:
        self._line("all_gather", x, self.size)
        return super().all_gather(x, dim, size)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._line("reduce_scatter", x)
        return super().reduce_scatter(x, dim)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        self._line("all_reduce", x)
        return super().all_reduce(x, op)

    def all_to_all(self, x: Tensor, cut: int, join: int) -> Tensor:
        self._line("all_to_all", x)
        return super().all_to_all(x, cut, join)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self._line("all_to_all", x)
        return super().all_to_all_uneven(x, send, receive)


@pytest.mark.parametrize("frozen", ["", "tokens", "weights"])
@pytest.mark.parametrize("method", OPTIONS)
def test_simulated_ranks_make_the_calls_that_are_announced(method, frozen):
    for case in CASES:
        routed = Routed.of(rows_of(case), case.experts, H, DTYPE, WEIGHTS)
        n, world = len(case.tokens), World(len(case.tokens))

        def work(rank: int) -> bool:
            group = Logged("ep", n, rank, world=world, key="ep")
            run(rows_of(case)[rank], case.experts, group, OPTIONS[method], frozen)
            wanted = {f"{name}_grad": name != frozen for name in ("tokens", "weights")}
            assert group.log == said(method, routed, group, **wanted)
            # Whatever the routing, the same collectives on every rank.
            assert [line[:2] for line in group.log] == [
                line[:2] for line in said(method, routed, AxisGroup("ep", n, 0), **wanted)
            ]
            return True

        assert all(world.run(work))


def _recorded() -> list[tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]]:
    """With the bytes that leave the rank."""
    found = []
    group = AxisGroup("ep", 4, dist.get_rank(), dist.group.WORLD.group_name)
    for method in OPTIONS:
        for case in CASES[:2]:
            with record_collectives() as log:
                run(rows_of(case)[group.rank], case.experts, group, OPTIONS[method])
            routed = Routed.of(rows_of(case), case.experts, H, DTYPE, WEIGHTS)
            announced = [
                (phase, sent.call.op, sent.call.elements, _bare(sent.call.dtype), sent.bytes)
                for phase in ("forward", "backward")
                for sent in sends(method, routed, group, phase=phase)
            ]
            found.append(([(c.phase, c.op, c.elements, c.dtype, c.wire_bytes) for c in log], announced))
    return found


def test_gloo_ranks_make_them_too_and_send_no_byte_more(pool):
    """What stays on its rank does not travel: of rows that all go to one expert, its own rank sends none."""
    ranks = pool.run(_recorded)
    for rank in ranks:
        for made, announced in rank:
            assert made == announced


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("tokens, k, experts", [(6, 2, 8), (7, 3, 4), (0, 1, 4)])
def test_shape_only_ranks_are_told_the_calls_of_even_routing(method, tokens, k, experts):
    for rank in (0, 3):
        lines: list[Line] = []
        group = AxisGroup("ep", 4, rank, on_call=teller(lines))
        with compat.fake_tensor_mode():
            run(torch.zeros(tokens, k, dtype=torch.int64), experts, group, OPTIONS[method])
        assert lines == said(method, Routed.even(tokens, k, experts, 4, rank, H, DTYPE, WEIGHTS), group)


def test_one_rank_sends_nothing():
    routed = Routed.of([torch.zeros(3, 2, dtype=torch.int64)], 4, H, DTYPE, WEIGHTS)
    for method in OPTIONS:
        assert collectives(method, routed, AxisGroup("ep", 1, 0)) == []


def test_bytes_are_those_of_the_formulas():
    """4096 tokens a rank, k 8, rows of 7168 bfloat16, 8 ranks: 411 MB one way, and 270 MB once per rank."""
    numbers = {"T": 4096, "k": 8, "H": 7168, "b": 2, "W": 8, "i": 1}
    assert int(expression("alltoall").subs(numbers)) == 2 * 411041792
    assert float(expression("dedup").subs(numbers)) / 2 == pytest.approx(269.7e6, rel=1e-3)
    assert int(expression("allgather").subs(numbers)) == 2 * 411041792

    # Expert (t + j) mod 8 is choice j of token t: every expert gets as much, and one pair of eight stays where it is.
    chosen = [(torch.arange(8)[:, None] + torch.arange(2)) % 8 for _ in range(8)]
    routed = Routed.of(chosen, 8, 100, torch.bfloat16, torch.float32)
    small = {"T": 8, "k": 2, "H": 100, "b": 2, "W": 8, "i": 1}
    group = AxisGroup("ep", 8, 3)
    counts = 8 * 8 * 7 // 8
    assert bytes_sent("alltoall", routed, group) == int(expression("alltoall").subs(small)) + counts
    assert bytes_sent("alltoall", routed, group, phase="backward") == int(expression("alltoall").subs(small))
    assert bytes_sent("allgather", routed, group, phase="backward", weights_grad=False) == int(
        expression("allgather").subs(small)
    )


def test_tokens_that_stay_do_not_travel():
    chosen = [torch.full((5, 1), rank, dtype=torch.int64) for rank in range(4)]
    routed = Routed.of(chosen, 4, H, DTYPE, WEIGHTS)
    counts = 4 * 8 * 3 // 4
    assert bytes_sent("alltoall", routed, AxisGroup("ep", 4, 1)) == counts
    assert bytes_sent("dedup", routed, AxisGroup("ep", 4, 1)) == 2 * counts
    assert bytes_sent("alltoall", routed, AxisGroup("ep", 4, 1), phase="backward") == 0


def test_an_unknown_dispatch_is_refused():
    routed = Routed.even(4, 2, 4, 2, 0, H, DTYPE, WEIGHTS)
    with pytest.raises(PlanError) as refusal:
        collectives("magic", routed, AxisGroup("ep", 2, 0))
    assert refusal.value.code == "bad-value"


def test_load_is_counted_per_expert_and_rank():
    load = load_table(torch.tensor([[3, 0, 1, 0], [3, 0, 0, 1]]), 2)
    assert load.experts == (6, 0, 1, 1) and load.by_rank == (6, 2) and load.idle == (1,)
    assert (load.imbalance, load.expert_imbalance) == (1.5, 3.0)
    lines = str(load).splitlines()
    assert lines[0] == "8 choices, 4 experts on 2 ranks   counted"
    assert lines[1] == "busiest rank 1.50 x mean, busiest expert 3.00 x mean, 1 idle"
    assert lines[3] == "   0     all         6  75.0%"
    assert lines[4] == "           0         6  75.0% " + "#" * 30
    assert load_table([0, 0]).imbalance == 1.0 and "0 choices" in str(load_table([0, 0]))
    with pytest.raises(PlanError) as refusal:
        load_table([1, 2, 3], 2)
    assert refusal.value.code == "experts-split"


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "ranks"), [(12, 1, 8, 2), (7, 2, 8, 4), (5, 3, 6, 2), (1, 1, 4, 4), (0, 2, 4, 2)]
)
def test_shape_only_ranks_are_told_of_no_more_choices_than_their_tokens_have(tokens, k, experts, ranks):
    for rows, *counts in Even.of(tokens, k, experts, ranks).rows_by_rank(ranks):
        assert sum(counts) <= k * rows and rows <= sum(counts)
