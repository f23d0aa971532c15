"""Windows of several processes that share memory: the protocol, a slow rank among them; and where there is no window."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshplan.errors import PlanError
from meshplan.kernels.experts.window import Sizes, Window, logical, open_window
from meshplan.ops.experts.experts import routed_experts
from meshplan.runtime.comm import AxisGroup
from tests.ops.experts.reference import Case, H, check, on_rank

CASES = [Case((4, 0, 3), experts=6, k=2, routing=routing) for routing in ("random", "holes")]
SIZES = Sizes(ranks=3, experts=6, tokens=4, k=2, row_bytes=8 * H, chunk=2, weight_bytes=8)


def rank_of_shared_memory(rank: int, regions: list[torch.Tensor], slow: int, answers: Any) -> None:
    try:
        window = Window(SIZES, {rank: regions[rank]}, [region.data_ptr() for region in regions])
        found = []
        for case in CASES:
            if rank == slow:
                time.sleep(0.5)
            made = on_rank(case, AxisGroup("ep", 3, rank), {"dispatch": "fused", "window": window})
            found.append({name: x.numpy() for name, x in made.items()})
        answers.put((rank, found))
    except BaseException as error:
        answers.put((rank, repr(error)))
        raise


def test_every_rank_gets_what_one_device_has_though_one_is_slow(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    regions = [torch.zeros(SIZES.region, dtype=torch.uint8).share_memory_() for _ in range(3)]
    answers = context.Queue()
    ranks = [context.Process(target=rank_of_shared_memory, args=(rank, regions, 1, answers)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=200) for _ in ranks)
        assert not any(isinstance(answer, str) for answer in found.values()), found
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    for at, case in enumerate(CASES):
        check(case, [{name: torch.from_numpy(x) for name, x in found[r][at].items()} for r in range(3)])
    # Flags: the last push that each owner has used, and the last answers that each source has fetched.
    for region in regions:
        window = Window(SIZES, {0: region}, [0] * 3)
        assert window.mine(0, "freed").tolist() == window.mine(0, "pulled").tolist() == [2 * len(CASES)] * 3
        assert window.mine(0, "heard").tolist() == [len(CASES)] * 3


def test_a_window_of_other_ranks_or_experts_is_refused():
    tokens, indices, weights = torch.zeros(2, H), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    sizes = dataclasses.replace(SIZES, ranks=2, experts=4)
    for window in (None, logical(sizes), logical(dataclasses.replace(sizes, experts=2))):
        with pytest.raises(PlanError) as caught:
            routed_experts(
                tokens, indices, weights, lambda x, _: x,
                experts=4, group=AxisGroup("ep", 2, 0), dispatch="fused", window=window,
            )  # fmt: skip
        assert caught.value.code == "experts-fused"


def test_what_only_other_dispatches_do_is_refused():
    tokens, indices, weights = torch.zeros(2, H), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    window = logical(dataclasses.replace(SIZES, ranks=1))
    for extra in ({"payload": "fp8"}, {"meanwhile": lambda: None}):
        with pytest.raises(PlanError) as caught:
            routed_experts(
                tokens, indices, weights, lambda x, _: x,
                experts=6, group=AxisGroup("ep", 1, 0), dispatch="fused", window=window, **extra,
            )  # fmt: skip
        assert caught.value.code == "bad-value"


def opened() -> str:
    try:
        open_window(dist.group.WORLD, SIZES, torch.device("cpu"))
    except PlanError as error:
        return error.code
    return ""


def test_cpu_ranks_have_no_window(pool):
    assert pool.run(opened, world=2) == ["experts-fused"] * 2


def test_bytes_of_a_region_are_bounded_by_the_sizes():
    sizes = Sizes(ranks=8, experts=256, tokens=4096, k=8, row_bytes=2 * 7168)
    rows = 8 * 4096
    assert 2 * rows * sizes.row_bytes < sizes.region < 1.01 * 2 * rows * sizes.row_bytes
    assert dataclasses.replace(sizes, capacity=rows // 2).region < 0.51 * sizes.region
    parts = list(sizes.fields.values())
    assert all(at % 16 == 0 and at + size <= after for (at, size), (after, _) in itertools.pairwise(parts))
