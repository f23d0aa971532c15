"""Peer rings of gloo ranks: memory that processes share, opened once a group, told to who records, refused out of reach."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

import meshplan as mp
from meshplan import compat
from meshplan.mesh.build import build_groups
from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.reach import require
from meshplan.runtime.recorder import record_collectives
from meshplan.runtime.shared_ring import SharedRing
from tests.distributed.test_context import plan, small_llama
from tests.runtime.rings import WINDOW, turns


def _turns(folder: str) -> tuple[str, list[str]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ring = SharedRing(compat.default_store(), "test/turns", rank, ranks, WINDOW, folder=folder)
    return turns(ring, rank, ranks, slow=2), os.listdir(folder)


def test_every_rank_gets_every_message_and_no_file_stays(pool, tmp_path):
    assert pool.run(_turns, str(tmp_path), world=3) == [("", [])] * 3


def _late() -> str:
    rank = dist.get_rank()
    ring = SharedRing(compat.default_store(), "test/late", rank, 2, WINDOW, timeout_s=1)
    if rank == 1:
        return "rank 1 publishes nothing"
    try:
        list(ring.share(torch.zeros(4)))
    except mp.PlanError as error:
        return f"{error.code}: {error.message}"
    return "went through"


def test_a_peer_that_does_not_come_is_told_after_a_while(pool):
    said = pool.run(_late, world=2)[0]
    assert said == "rank-missing: rank 0 of a peer ring waited 1 s for a peer (ready/1/1)"


def _through_groups() -> list[object]:
    """Two groups of two ranks, messages that grow beyond a window, and what is recorded."""
    groups = build_groups(MeshSpec((("cp", 2), ("tp", 2))), "cpu")
    cp, found = groups.group("cp"), []
    for size in (8, 40_000):
        mine = torch.arange(float(size)) + groups.rank
        with record_collectives() as log:
            got = {source: x[0].item() for source, x in cp.share(mine)}
            total = cp.collect([mine, mine + 10])
        said = [(c.op, c.ranks, c.elements, c.wire_bytes) for c in log]
        found.append((got, total[0].item(), said))
    return found


def test_groups_have_a_ring_each_that_grows_and_is_recorded(pool):
    ranks = pool.run(_through_groups, world=4)
    for rank, found in enumerate(ranks):
        at, pair = rank // 2, (rank % 2, rank % 2 + 2)
        for size, (got, total, said) in zip((8, 40_000), found, strict=True):
            assert got == {i: float(pair[i]) for i in range(2)}
            assert total == sum(pair) + 20 * at
            assert said == [("peer_pull", pair, size, 4 * size)] * 2


def test_abstract_groups_say_what_is_pulled():
    told = []
    group = AxisGroup("cp", 3, 1, on_call=lambda op, g, x: told.append((op, g.axis, x.numel())))
    assert [source for source, _ in group.share(torch.zeros(6))] == [1, 2, 0]
    group.collect([torch.zeros(4)] * 3)
    assert told == [("peer_pull", "cp", 6)] * 2 + [("peer_pull", "cp", 4)] * 2


def _elsewhere() -> tuple[str, str]:
    """Rank 2 says that it is on another host."""
    groups = build_groups(MeshSpec((("cp", 2), ("tp", 2))), "cpu")
    real = socket.gethostname
    name = groups.group("cp").name
    assert name is not None
    try:
        socket.gethostname = lambda: "other" if groups.rank == 2 else real()
        require(name, "cp", "cpu", asks="context.transport is peer", code="peers-out-of-reach", legal="")
    except mp.PlanError as error:
        return error.code, error.message
    finally:
        socket.gethostname = real
    return "", "went through"


def test_ranks_on_two_hosts_are_refused_on_every_rank(pool):
    said = pool.run(_elsewhere, world=4)
    own = ("peers-out-of-reach", "context.transport is peer, and the ranks [0, 2] of cp are on 2 hosts")
    assert said[0] == said[2] == own
    assert all(code == "rank-failed" and "[0, 2] of cp" in message for code, message in (said[1], said[3]))


def test_a_group_without_ranks_is_run_through_as_it_is_listed():
    """On torch's fake process group shapes go around, and nobody is waited for."""
    given = plan({"cp": 4}, "ring", transport="peer")
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        model = mp.parallelize(small_llama(), given)
        tokens = torch.zeros(2, 24, dtype=torch.int64)
        with record_collectives() as log:
            model(**mp.shard_batch(model, {"tokens": tokens, "labels": tokens})).backward()
    finally:
        dist.destroy_process_group()
    listed = mp.lower(small_llama(), given, 4).collectives
    pulled = [(c.phase, c.elements, c.dtype) for c in listed if c.op == "peer_pull"]
    assert [(c.phase, c.elements, c.dtype) for c in log if c.op == "peer_pull"] == pulled != []
