"""Agreement among threads on real stores: what every rank hears when all is well, and when something is not."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshplan.errors import PlanError
from meshplan.mesh.agree import agree


@pytest.fixture(params=["tcp", "file", "hash"])
def connect(request, tmp_path):
    """A function that gives a rank its own handle of one store, as each process has."""
    if request.param == "hash":
        shared = dist.HashStore()
        return lambda world: [shared] * world
    if request.param == "file":
        path = str(tmp_path / "store")
        return lambda world: [dist.FileStore(path, world) for _ in range(world)]

    def tcp(world):
        server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
        rest = [dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=20)) for _ in range(world - 1)]
        return [server, *rest]

    return tcp


def hear(connect, world, say, *, absent=(), timeout_s=20.0, rounds=1):
    """What each rank heard in the last of `rounds`: None, or the PlanError. `say(rank)` gives hash, facts and error."""
    stores = connect(world)

    def one(rank):
        for _ in range(rounds):
            program_hash, facts, error = say(rank)
            try:
                agree(
                    stores[rank],
                    rank,
                    world,
                    program_hash=program_hash,
                    facts=facts,
                    error=error,
                    tag="lower",
                    timeout_s=timeout_s,
                )
                heard = None
            except PlanError as failure:
                heard = failure
        return heard

    with ThreadPoolExecutor(world) as pool:
        futures = {rank: pool.submit(one, rank) for rank in range(world) if rank not in absent}
        return {rank: future.result(60) for rank, future in futures.items()}


def only(heard, world, absent=()):
    """The one (code, text) that all ranks present heard."""
    assert sorted(heard) == [rank for rank in range(world) if rank not in absent]
    (answer,) = {(failure.code, str(failure)) for failure in heard.values()}
    return answer


def test_equal_programs_pass_also_when_the_tag_is_used_again(connect):
    assert hear(connect, 5, lambda rank: ("same", {"plan": "x"}, None), rounds=3) == dict.fromkeys(range(5))


def test_every_rank_hears_which_fact_differs_where_with_both_values(connect):
    def say(rank):
        shape = "(8, 1024)" if rank in (1, 4) else "(8, 2048)"
        return f"hash of {shape}", {"tokens.shape": shape, "torch": "2.13.0"}, None

    code, text = only(hear(connect, 5, say), 5)
    assert code == "ranks-differ"
    assert "tokens.shape: (8, 2048) on ranks 0, 2-3; (8, 1024) on ranks 1, 4" in text
    assert "torch" not in text


def test_a_fact_only_one_rank_has_is_a_difference(connect):
    heard = hear(connect, 2, lambda rank: (f"{rank}", {"bias": "R"} if rank else {}, None))
    assert "bias: (nothing) on rank 0; R on rank 1" in only(heard, 2)[1]


def test_programs_that_differ_in_no_fact_are_told_by_their_hashes(connect):
    code, text = only(hear(connect, 3, lambda rank: ("b2" if rank == 2 else "a1", {"plan": "x"}, None)), 3)
    assert code == "ranks-differ"
    assert "program a1 on ranks 0-1" in text and "program b2 on rank 2" in text


@pytest.mark.parametrize("broken", [0, 3])
def test_the_error_of_one_rank_is_raised_on_all(connect, broken):
    heard = hear(connect, 4, lambda rank: ("same", {}, "no kernel for head size 72" if rank == broken else None))
    code, text = only(heard, 4)
    assert code == "rank-failed"
    assert f"rank {broken} failed: no kernel for head size 72" in text


def test_equal_errors_are_said_once(connect):
    _, text = only(hear(connect, 4, lambda rank: ("same", {}, "out of memory" if rank % 2 else None)), 4)
    assert text.count("out of memory") == 1
    assert "ranks 1, 3 failed: out of memory" in text


def test_a_later_round_can_disagree_after_one_that_agreed(connect):
    turns = {0: 0, 1: 0}

    def say(rank):
        turns[rank] += 1
        return ("same" if turns[rank] == 1 else f"{rank}"), {}, None

    assert only(hear(connect, 2, say, rounds=2), 2)[0] == "ranks-differ"


def test_a_rank_that_never_comes_is_named_on_all_others(connect):
    began = time.monotonic()
    heard = hear(connect, 4, lambda rank: ("same", {}, None), absent=(2,), timeout_s=0.5)
    code, text = only(heard, 4, absent=(2,))
    assert code == "rank-missing"
    assert "rank 2 of 4 did not arrive within 0.5 s" in text
    # Half a second, and what the store takes to say so; not the minutes of a store or group time-out.
    assert time.monotonic() - began < 15


def test_a_missing_rank_0_is_named_too(connect):
    code, text = only(hear(connect, 3, lambda rank: ("same", {}, None), absent=(0,), timeout_s=0.5), 3, absent=(0,))
    assert code == "rank-missing"
    assert "rank 0 did not arrive" in text


def test_an_error_and_a_missing_rank_are_both_said(connect):
    say = lambda rank: ("same", {}, "bad shard" if rank == 1 else None)  # noqa: E731
    code, text = only(hear(connect, 3, say, absent=(2,), timeout_s=0.5), 3, absent=(2,))
    assert code == "rank-failed"
    assert "rank 1 failed: bad shard" in text and "rank 2 never arrived" in text


def test_a_rank_alone_agrees_with_itself_and_still_raises_its_error():
    agree(dist.HashStore(), 0, 1, program_hash="x", facts={}, error=None, tag="t")
    with pytest.raises(PlanError, match="bad shard") as error:
        agree(dist.HashStore(), 0, 1, program_hash="x", facts={}, error="bad shard", tag="t")
    assert error.value.code == "rank-failed"


def test_ranks_other_than_0_make_a_constant_number_of_store_calls():
    def calls(world):
        counts = [0] * world

        class Counting:
            def __init__(self, store, rank):
                self.store, self.rank = store, rank

            def __getattr__(self, name):
                counts[self.rank] += 1
                return getattr(self.store, name)

        shared = dist.HashStore()
        heard = hear(lambda n: [Counting(shared, r) for r in range(n)], world, lambda rank: ("same", {}, None))
        assert set(heard.values()) == {None}
        return counts

    assert max(calls(3)[1:]) <= 7
    assert max(calls(24)[1:]) <= 7
