"""Dropped choices are those of one device that serves the whole batch in order, on any number of ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts.capacity import collectives, limit
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives
from tests.ops.experts.reference import Case, indices, simulated, tensors


def served(case: Case, factor: float, policy: str, positions: Tensor) -> Tensor:
    """One device, choice by choice."""
    chosen, weights = indices(case), tensors(case)["weights"]
    left = [math.ceil(factor * int((chosen >= 0).sum()) / case.experts)] * case.experts
    queue = list(itertools.product(range(chosen.shape[0]), range(case.k)))
    queue.sort(key=lambda slot: (-float(weights[slot]) if policy == "score" else 0.0, int(positions[slot[0]]), slot[1]))
    out = chosen.clone()
    for slot in queue:
        e = int(chosen[slot])
        if e >= 0 and left[e] == 0:
            out[slot] = -1
        elif e >= 0:
            left[e] -= 1
    return out


def positions_of(case: Case, shuffled: bool) -> Tensor:
    total = sum(case.tokens)
    return torch.randperm(total, generator=torch.Generator().manual_seed(3)) if shuffled else torch.arange(total)


def on_rank(case: Case, group: AxisGroup, options: dict[str, Any]) -> Tensor:
    rows = slice(sum(case.tokens[: group.rank]), sum(case.tokens[: group.rank + 1]))
    options = dict(options)
    if options.pop("shuffled"):
        options["positions"] = positions_of(case, True)[rows]
    return limit(indices(case)[rows], tensors(case)["weights"][rows], experts=case.experts, group=group, **options)


CASES = [
    Case((7, 5), k=2),
    Case((3, 0, 6, 2), k=3, routing="one"),
    Case((3, 0, 6, 2), k=2, routing="same"),
    Case((9,), k=4, routing="holes"),
    Case((0, 0), k=1),
]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("policy", ["position", "score"])
def test_what_is_dropped_is_what_one_device_drops(policy, shuffled):
    for case, factor in itertools.product(CASES, (0.3, 1.0, 1.25)):
        options = {"capacity_factor": factor, "policy": policy, "shuffled": shuffled}
        found = torch.cat(simulated(case, options, on_rank))
        assert torch.equal(found, served(case, factor, policy, positions_of(case, shuffled)))


def test_equal_weights_are_dropped_by_position():
    chosen = torch.zeros(4, 1, dtype=torch.int64)
    found = limit(chosen, torch.ones(4, 1), experts=2, capacity_factor=1.0, group=AxisGroup("dp", 1, 0), policy="score")
    assert found.tolist() == [[0], [0], [-1], [-1]]


def test_dropless_is_the_default_and_sends_nothing():
    told: list[str] = []
    group = AxisGroup("dp", 2, 0, on_call=lambda op, g, x: told.append(op))
    chosen = torch.zeros(4, 1, dtype=torch.int64)
    assert limit(chosen, torch.ones(4, 1), experts=2, capacity_factor=None, group=group) is chosen and told == []


def _recorded() -> list[tuple[list[tuple[str, int, str]], list[tuple[str, int, str]], Tensor]]:
    group, case, found = AxisGroup("dp", 4, dist.get_rank(), dist.group.WORLD.group_name), CASES[1], []
    for policy, shuffled in itertools.product(("position", "score"), (False, True)):
        with record_collectives() as log:
            kept = on_rank(case, group, {"capacity_factor": 1.0, "policy": policy, "shuffled": shuffled})
        announced = collectives(
            case.tokens, case.k, case.experts, group, policy=policy, positions=shuffled, weights_dtype=torch.float64
        )
        said = [(c.op, c.elements, str(c.dtype).removeprefix("torch.")) for c in announced]
        found.append(([(c.op, c.elements, c.dtype) for c in log], said, kept))
    return found


def test_gloo_ranks_drop_the_same_and_send_what_is_announced(pool):
    ranks = pool.run(_recorded)
    for i, (policy, shuffled) in enumerate(itertools.product(("position", "score"), (False, True))):
        assert all(r[i][0] == r[i][1] for r in ranks)
        found = torch.cat([r[i][2] for r in ranks])
        assert torch.equal(found, served(CASES[1], 1.0, policy, positions_of(CASES[1], shuffled)))


@pytest.mark.parametrize("options", [{"policy": "luck"}, {"capacity_factor": 0.0}, {"capacity_factor": math.inf}])
def test_what_cannot_be_is_refused(options):
    chosen = torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(PlanError) as refusal:
        limit(
            chosen,
            torch.ones(4, 1),
            **{"experts": 2, "capacity_factor": 1.0, "group": AxisGroup("dp", 1, 0), **options},
        )
    assert refusal.value.code == "bad-value"
