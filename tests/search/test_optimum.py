"""The planner's optimum is the optimum: every assignment of a small program's options and placements, enumerated."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.compiler.kinds import I, replicated
from meshplan.compiler.skeleton import fake_world
from meshplan.cost.machine import FREE, Machine
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.search.attempts import Search
from meshplan.search.axis import AxisProblem, Limits
from meshplan.search.moves import move_cost
from meshplan.search.trace import traced


class Chain(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20, bias=bias), nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Twice(nn.Module):
    """One value that two calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 8, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(x)
        return self.a(h) * self.b(h)


def problem(model: nn.Module, nbytes: float | None, latency: bool) -> tuple[AxisProblem, Search]:
    spec = MeshSpec.resolve({"tp": 2}, 2)
    x = torch.empty(3, 6, 12, requires_grad=True)
    plan = Plan(mesh={"tp": 2})
    with fake_world() as mode:
        program = traced(model, plan, {"x": x}, mode, spec)
        with mode:
            search = Search(model, plan, {"x": x}, spec, program, {}, Machine())
            limits = Limits(bytes=nbytes, sequence=None if latency else True)
            return search.problem(limits), search


def cheapest(found: AxisProblem, nbytes: float | None, latency: bool) -> float:
    """The least cost over all choices of options and placements, a move paid once a value and kind."""
    program, link = found.program, found.link
    sources = [v for v, value in enumerate(program.values) if value.made is None]
    placements = [list(found.y[v]) for v in sources]
    best = float("inf")
    for options in product(*found.options):
        work = sum(
            found._work(node) * o.share * node.weight + found._inner(node, o).seconds
            for node, o in zip(program.nodes, options, strict=True)
        )
        if work >= best:
            continue
        for kinds in product(*placements):
            placed = dict(zip(sources, kinds, strict=True))
            held = sum(found._bytes(v, k) for v, k in placed.items() if program.values[v].params)
            if nbytes is not None and held > nbytes:
                continue
            total = FREE
            for v, value in enumerate(program.values):
                have = placed[v] if value.made is None else options[value.made[0]].outs[value.made[1]]
                wanted = {options[n].ins[j] for n, j in value.uses} | ({I} if value.output else set())
                if value.params and len({str(k) for k in wanted if replicated(k)}) > 1:
                    break
                costs = [move_cost(value.tensor, have, want, link, bool(value.params), latency) for want in wanted]
                if None in costs:
                    break
                for cost in costs:
                    total = total + cost
            else:
                best = min(best, work + total.seconds)
    return best


@pytest.mark.parametrize("latency", [True, False], ids=["with-latency", "bytes-only"])
@pytest.mark.parametrize("share", [0.55, 0.8, None])
@pytest.mark.parametrize("model", [Chain(False), Chain(True), Twice()], ids=["chain", "chain+bias", "twice"])
def test_the_solution_costs_what_the_best_of_all_costs(model, share, latency):
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    nbytes = None if share is None else share * total
    found, _ = problem(model, nbytes, latency)
    choice = found.solve(60, 0.0)
    assert choice.seconds == pytest.approx(cheapest(found, nbytes, latency), rel=1e-6)
    assert choice.bound == pytest.approx(choice.seconds, rel=1e-6)
    assert nbytes is None or choice.bytes <= nbytes + 1e-6


def test_the_least_bytes_are_those_of_everything_split():
    found, _ = problem(Chain(True), None, True)
    # Weights of 20 x 12 and 12 x 20 and a bias of 20, in float32, each cut in two.
    assert found.least_bytes(60, 0.0) == pytest.approx((240 + 240 + 20) * 4 / 2)


def test_a_cut_that_leaves_a_rank_nothing_is_no_option():
    found, _ = problem(Twice(), None, True)
    for node, options in zip(found.program.nodes, found.options, strict=True):
        for option in options:
            for v, kind in zip((*node.ins, *node.outs), (*option.ins, *option.outs), strict=True):
                if isinstance(kind, Shard):
                    assert found.program.values[v].tensor.shape[kind.dim] >= 2
