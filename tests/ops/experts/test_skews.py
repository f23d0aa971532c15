"""Skewed routing on 2, 4 and 8 ranks, simulated and gloo: all to one expert, idle experts, ranks without tokens, one token, top 1
to 8. Results and all gradients are those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from meshplan.runtime.comm import AxisGroup
from meshplan.verify.pool import RankPool
from tests.ops.experts.reference import Case, check, gloo_levels, on_rank, simulated

METHODS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dedup": {"dedup": True},
    "allgather": {"dispatch": "allgather"},
    "twolevel": {"dispatch": "twolevel", "dedup": True, "nodes": 2},
    "twolevel, plain inside": {"dispatch": "twolevel", "nodes": 2},
}
TOKENS = {2: (5, 0), 4: (3, 0, 6, 2), 8: (3, 0, 6, 2, 1, 0, 4, 5)}
"""A rank has none, and no two have as many."""


def skews(n: int) -> list[Case]:
    experts = 2 * n if n > 2 else 8
    one = tuple(int(rank == n - 1) for rank in range(n))
    return [
        Case(TOKENS[n], experts, 2, "same"),  # all choices of all tokens: one expert
        Case(TOKENS[n], experts, 3, "one"),  # the first choice of all tokens is one expert
        Case(TOKENS[n], experts, 2, "idle"),  # half of the ranks have nothing to compute
        Case(TOKENS[n], experts, 4, "holes"),
        Case(one, experts, 2),
        Case((0,) * n, experts, 2),
        *(Case(TOKENS[n], experts, k) for k in range(1, 9)),
    ]


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("method", METHODS)
def test_simulated_ranks_are_one_device(method, n):
    for case in skews(n):
        check(case, simulated(case, METHODS[method]))


@pytest.mark.parametrize("method", ["twolevel", "twolevel, plain inside"])
def test_four_nodes_of_two_are_one_device(method):
    for case in skews(8):
        check(case, simulated(case, METHODS[method] | {"nodes": 4}))


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    """Gloo ranks of this file's own: the session's pool has four."""
    with RankPool(8) as ranks:
        yield ranks


def _on_gloo(n: int) -> list[dict[str, Tensor]]:
    group = AxisGroup("ep", n, dist.get_rank(), dist.group.WORLD.group_name)  # type: ignore[union-attr]
    levels, found = gloo_levels(2), []
    for options in METHODS.values():
        given = dict(options)
        if given.pop("nodes", None):
            given["levels"] = levels
        found += [on_rank(case, group, given) for case in skews(n)]
    return found


@pytest.mark.parametrize("n", TOKENS)
def test_gloo_ranks_are_one_device(eight, n):
    ranks = eight.run(_on_gloo, n, world=n)
    cases = skews(n) * len(METHODS)
    assert len(cases) == len(ranks[0])
    for i, case in enumerate(cases):
        check(case, [r[i] for r in ranks])
