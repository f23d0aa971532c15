"""What any peer ring must do: several turns of both its calls, with messages of several sizes, and one rank that is slow."""

from __future__ import annotations

import time

import torch

from meshplan.runtime.peer_ring import PeerRing

WINDOW = 64
ROUNDS = 5


def message(rank: int, turn: int) -> torch.Tensor:
    """Of another size and dtype from turn to turn; all ranks' alike."""
    dtype = (torch.bfloat16, torch.float32)[turn % 2]
    return (torch.arange(16 - 2 * (turn % 3)) + 100 * rank + 10 * turn).to(dtype)


def parts(rank: int, ranks: int, turn: int) -> list[torch.Tensor]:
    return [torch.arange(8.0) * (rank + 1) + 10 * other + turn for other in range(ranks)]


def turns(ring: PeerRing, rank: int, ranks: int, slow: int) -> str:
    """What went wrong in `ROUNDS` of both calls, if something did. Rank `slow` comes late, and uses messages slowly."""
    for turn in range(ROUNDS):
        if rank == slow:
            time.sleep(0.2)
        seen = []
        for source, got in ring.share(message(rank, turn)):
            if rank == slow:
                time.sleep(0.05)
            seen.append(source)
            if not torch.equal(got, message(source, turn)):
                return f"turn {turn}: rank {rank} got {got} of rank {source}"
        if seen != [(rank + step) % ranks for step in range(ranks)]:
            return f"turn {turn}: rank {rank} got messages of {seen}"
        total = ring.collect(parts(rank, ranks, turn))
        want = sum(parts(other, ranks, turn)[rank] for other in range(ranks))
        if not torch.equal(total, want):
            return f"turn {turn}: rank {rank} has {total}, not {want}"
    return ""
