"""Who sends how many rows to whom: told by each rank to all, read by the host once, and made into tables for kernels.

    rows to rank        0  1          inbox of rank 0    rows of rank 0 at 0, of rank 1 at 4 (chunks of 4)
    rank 0 sends        3  5          inbox of rank 1    rows of rank 0 at 0, of rank 1 at 8
    rank 1 sends        2  0

All ranks come to the same tables, so that whatever cannot be done is refused by all of them, before any row is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.experts.exchange import owners_launch, signal_launch, tell_launch, wait_launch
from meshplan.kernels.experts.numbers import machine_of
from meshplan.kernels.experts.sort import Sorted, sort
from meshplan.kernels.experts.window import Sizes, Window
from meshplan.ops.experts.contract import refuse_indices

_FINE, _BAD_INDEX, _TOO_LARGE = 0, 1, 2


@dataclass(frozen=True)
class Deal:
    """One exchange's numbers, alike on all ranks.

    Attributes:
        rows: [n][n], tokens of rank i with an expert on rank j; counts: [n][E], choices of rank i's tokens for expert e.
    """

    sizes: Sizes
    rows: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]

    def chunks(self, source: int, owner: int) -> int:
        return -(-self.rows[source][owner] // self.sizes.chunk)

    def base(self, source: int, owner: int) -> int:
        """Where the block of `source` begins in the inbox of `owner`."""
        return sum(self.chunks(s, owner) for s in range(source)) * self.sizes.chunk

    def filled(self, owner: int) -> int:
        """Rows of its inbox, blanks between blocks included."""
        return self.base(self.sizes.ranks, owner)

    def first(self, source: int, owner: int) -> int:
        """Where the rows for `owner` begin in the list of those that `source` sends."""
        return sum(self.rows[source][:owner])

    def experts(self, owner: int) -> tuple[int, ...]:
        """Rows of each of its experts."""
        local = self.sizes.experts // self.sizes.ranks
        mine = range(owner * local, (owner + 1) * local)
        return tuple(sum(told[e] for told in self.counts) for e in mine)

    def refuse(self) -> None:
        """Raises PlanError `experts-overflow` if some inbox cannot hold what comes."""
        capacity = self.sizes.chunks * self.sizes.chunk
        for owner in range(self.sizes.ranks):
            if self.filled(owner) > capacity:
                raise overflow(f"{self.filled(owner)} rows come to rank {owner}, whose window holds {capacity}")


@dataclass(frozen=True)
class Tables:
    """What kernels of one rank read of a deal.

    Attributes:
        send, receive: int32 [5, n], runs of chunks: first chunk, rank, first inbox row, first row of the list (for `receive` the
            first flag of this owner's answers at that rank), rows. A rank sends to itself first, then to the next one.
        homes: int32 [2, n]: by owner, first inbox row and first row of the list.
        sent, received: chunks.
    """

    send: Tensor
    receive: Tensor
    homes: Tensor
    sent: int
    received: int

    @staticmethod
    def of(deal: Deal, rank: int, device: torch.device) -> Tables:
        n = deal.sizes.ranks
        owners = [(rank + step) % n for step in range(n)]
        sent = [deal.chunks(rank, d) for d in owners]
        came = [deal.chunks(s, rank) for s in range(n)]
        send = [
            _before(sent),
            owners,
            [deal.base(rank, d) for d in owners],
            [deal.first(rank, d) for d in owners],
            [deal.rows[rank][d] for d in owners],
        ]
        receive = [
            _before(came),
            list(range(n)),
            [deal.base(s, rank) for s in range(n)],
            [rank * deal.sizes.chunks_sent] * n,
            [deal.rows[s][rank] for s in range(n)],
        ]
        homes = [[deal.base(rank, d) for d in range(n)], [deal.first(rank, d) for d in range(n)]]
        made = torch.tensor([*send, *receive, *homes], dtype=torch.int32).to(device, non_blocking=True)
        return Tables(made[:5], made[5:10], made[10:], sum(sent), sum(came))


@dataclass(frozen=True)
class Routed:
    """One rank's tokens, sorted by the ranks that they go to: `rows` int64 [N] of them, `place` int64 [T, n] in this list."""

    rows: Tensor
    place: Tensor


def agree(window: Window, indices: list[Tensor], bytes_of_row: int) -> tuple[Deal, list[Routed]]:
    """What all ranks send: counts told and heard. The one place where the host waits for the device.

    Arguments:
        indices: [T, k] of each rank that is held.

    Raises:
        PlanError: `expert-index`, `experts-overflow`, on all ranks together.
    """
    sizes, n = window.sizes, window.sizes.ranks
    window.told += 1
    window.tell("peer_push", torch.empty(n - 1, sizes.words, dtype=torch.int32, device=window.device))
    lists = []
    for rank, chosen in zip(window.held, indices, strict=True):
        keys = torch.empty(chosen.shape[0], n, dtype=torch.int32, device=chosen.device)
        owners_launch(chosen, keys, sizes.experts // n, machine_of(chosen.device)).run()
        found = sort(keys, n)
        lists.append(found)
        fits = chosen.shape[0] <= sizes.tokens and chosen.shape[1] <= sizes.k and bytes_of_row <= sizes.row_bytes
        bad = (chosen >= sizes.experts).any()
        status = torch.where(bad, _BAD_INDEX, _FINE if fits else _TOO_LARGE)
        counts = sort(chosen, sizes.experts).counts
        tell_launch(window, rank, torch.cat([status[None], found.counts, counts]).to(torch.int32)).run()
    deal = None
    for rank in window.held:
        wait_launch(window.mine(rank, "heard"), window.told).run()
        heard = window.slot(rank).tolist()
        status = max(told[0] for told in heard)
        refuse_indices(status == _BAD_INDEX, sizes.experts)
        if status == _TOO_LARGE:
            raise overflow(
                f"a rank has more than {sizes.tokens} tokens, {sizes.k} choices or {sizes.row_bytes} bytes a row"
            )
        deal = Deal(sizes, tuple(tuple(t[1 : 1 + n]) for t in heard), tuple(tuple(t[1 + n :]) for t in heard))
    assert deal is not None
    deal.refuse()
    return deal, [_routed(found, sum(deal.rows[rank]), n) for rank, found in zip(window.held, lists, strict=True)]


def release(window: Window, flag: str, epoch: int) -> None:
    """Tell everyone that the ranks here have used what came (`freed`), or fetched what was answered (`pulled`)."""
    for rank in window.held:
        signal_launch(window, rank, flag, epoch).run()


def overflow(problem: str) -> PlanError:
    """The error of rows that an inbox, or of a row that its pitch, does not hold."""
    return PlanError(
        f"fused experts: {problem}",
        code="experts-overflow",
        legal="a window with a larger capacity (0 holds everything that can come), or dispatch: alltoall",
    )


def _routed(found: Sorted, sent: int, n: int) -> Routed:
    return Routed(found.slots[:sent] // n, found.place.view(-1, n))


def _before(chunks: list[int]) -> list[int]:
    return [sum(chunks[:i]) for i in range(len(chunks))]
