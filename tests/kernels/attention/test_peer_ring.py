"""The ring over peers' memory: processes that share memory, several epochs, a slow rank; and by send and receive."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshplan.errors import PlanError
from meshplan.kernels.attention.peer_ring import Memory, P2PRing, SymmetricRing, region_size
from tests.kernels.interpreted import interpreted
from tests.runtime.rings import ROUNDS, WINDOW, turns


def rank_of_shared_memory(rank: int, regions: list[torch.Tensor], slow: int, answers) -> None:
    try:
        ring = SymmetricRing(Memory(rank, regions[rank], [r.data_ptr() for r in regions], WINDOW))
        answers.put(turns(ring, rank, len(regions), slow))
    except BaseException as error:
        answers.put(repr(error))
        raise


@pytest.mark.parametrize("slow", [0, 2])
def test_every_rank_gets_every_message_in_every_epoch(slow, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    regions = [torch.zeros(region_size(WINDOW, 3), dtype=torch.uint8).share_memory_() for _ in range(3)]
    answers = context.Queue()
    ranks = [context.Process(target=rank_of_shared_memory, args=(rank, regions, slow, answers)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        assert [answers.get(timeout=200) for _ in ranks] == ["", "", ""]
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    # Flags: the last epoch of each peer; of `collect`, in whose last round rank r is read by rank r + 1.
    last = ROUNDS * 3
    for rank, region in enumerate(regions):
        ready, taken = region[2 * WINDOW :].view(torch.int32).view(2, 3).tolist()
        assert ready == [last] * 3
        assert taken[rank] == 0 and taken[(rank + 1) % 3] == last


def rank_of_a_group(slow: int) -> str:
    ring = P2PRing(dist.group.WORLD)
    return turns(ring, dist.get_rank(), dist.get_world_size(), slow)


@pytest.mark.parametrize("world", [1, 3])
def test_send_and_receive_do_the_same(pool, world):
    assert pool.run(rank_of_a_group, 0, world=world) == [""] * world


@interpreted
def test_messages_that_a_window_does_not_hold_are_refused():
    region = torch.zeros(region_size(WINDOW, 1), dtype=torch.uint8)
    ring = SymmetricRing(Memory(0, region, [region.data_ptr()], WINDOW))
    for wrong, said in (
        (torch.zeros(33), "132 bytes in a ring for 64"),
        (torch.zeros(3, dtype=torch.bfloat16), "6 bytes"),
    ):
        with pytest.raises(PlanError, match=said) as caught:
            next(ring.share(wrong))
        assert caught.value.code == "attention-kernel"
