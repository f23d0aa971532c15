"""One fused call on the ranks that a process holds: rows sent, awaited, answered and pulled, forward and backward alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.kernels.experts.deal import Deal, Routed, Tables, release
from meshplan.kernels.experts.exchange import (
    accept_launch,
    answer_launch,
    choose_launch,
    pull_launch,
    pull_weights_launch,
    push_launch,
    wait_launch,
)
from meshplan.kernels.experts.gather import Flags
from meshplan.kernels.experts.numbers import machine_of, unit_stride
from meshplan.kernels.experts.sort import pairs_of, sort
from meshplan.kernels.experts.window import Window
from meshplan.ops.experts.routing import Pairs


@dataclass
class Call:
    """One fused call: what its forward and its backward know. `there` are the pairs of each rank's inbox."""

    window: Window
    deal: Deal
    routed: list[Routed]
    indices: list[Tensor]
    tables: tuple[Tables, ...]
    k: int
    there: tuple[Pairs, ...] = ()
    sending: Sequence[Tensor] = ()

    def choose(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Send the choices ahead of the rows. Returns the weights [R, k] of each inbox's rows, and sets `there`."""
        window, came = self.window, []
        window.pushed += 1
        self._tell("peer_push", self.k, torch.int32)
        self._tell("peer_push", self.k, weights[0].dtype)
        for at, rank in enumerate(window.held):
            table, rows = self.tables[at], self.routed[at].rows
            choose_launch(window, rank, self.indices[at], weights[at], rows, table.send, table.sent).run()
        pairs = []
        for at, rank in enumerate(window.held):
            size = self.deal.filled(rank)
            choices = torch.empty(size, self.k, dtype=torch.int32, device=window.device)
            heavy = weights[at].new_empty(size, self.k)
            accept_launch(window, rank, choices, heavy, self.tables[at].receive, self.tables[at].received).run()
            counts = self.deal.experts(rank)
            pairs.append(pairs_of(sort(choices, len(counts)).slots, sum(counts), self.k))
            came.append(heavy)
        self.there = tuple(pairs)
        return came

    def push(self, x: Sequence[Tensor]) -> None:
        """Rows on their way, beside what this stream does next.

        Until `sent` nothing may wait for rows that takes the whole chip: what sends them could then not start. The matmul leaves
        processors free.
        """
        # What the other stream reads must not be freed before it has.
        self.sending = [unit_stride(rows) for rows in x]
        self._tell("peer_push", x[0].shape[1], x[0].dtype)
        window, machine = self.window, machine_of(self.window.device)
        here = torch.cuda.current_stream(window.device) if window.side is not None else None
        if window.side is not None:
            window.side.wait_stream(here)
        for at, rank in enumerate(window.held):
            table, rows = self.tables[at], self.routed[at].rows
            launch = push_launch(window, rank, self.sending[at], rows, table.send, table.sent, machine)
            with torch.cuda.stream(window.side):
                launch.run()

    def sent(self) -> None:
        """This stream goes on once the rows have left."""
        if self.window.side is not None:
            torch.cuda.current_stream(self.window.device).wait_stream(self.window.side)
        self.sending = []

    def used(self) -> None:
        """What came was used: inboxes serve the next exchange."""
        release(self.window, "freed", self.window.pushed)

    def _tell(self, op: str, width: int, dtype: torch.dtype) -> None:
        """Let the window hear of the rows that leave the rank here, or whose answers come home to it."""
        rank = self.window.held[0]
        sent = self.deal.rows[rank]
        like = torch.empty(1, width, dtype=dtype, device=self.window.device)
        self.window.tell(op, like.expand(sum(sent) - sent[rank], width))

    def flags(self, rank: int) -> Flags:
        """Those of its inbox's rows, in the push that is under way."""
        return Flags(self.window.mine(rank, "arrived"), self.window.sizes.chunk, self.window.pushed)

    def inbox(self, rank: int, like: Tensor) -> Tensor:
        return self.window.rows(rank, "inbox", like.dtype, like.shape[1])[: self.deal.filled(rank)]

    def answer(
        self,
        y: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        back: Sequence[Tensor | None],
        like: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sums of pairs into the outboxes, with `back` [R, k] beside them; pulled home. Returns [T, H] and [T, k] (of `back`)."""
        window, machine = self.window, machine_of(self.window.device)
        window.answered += 1
        self._tell("peer_pull", like[0].shape[1], like[0].dtype)
        if back[0] is not None:
            self._tell("peer_pull", self.k, back[0].dtype)
        for at, rank in enumerate(window.held):
            wait_launch(window.mine(rank, "pulled"), window.answered - 1).run()
            table, place = self.tables[at], self.there[at].place
            answer_launch(
                window, rank, unit_stride(y[at]), weights[at], place, back[at], table.receive, table.received, machine
            ).run()
        rows, numbers = [], []
        for at, rank in enumerate(window.held):
            routed, homes = self.routed[at], self.tables[at].homes
            out = torch.empty(like[at].shape, dtype=like[at].dtype, device=window.device)
            pull_launch(window, rank, out, routed.place, routed.rows.shape[0], homes, machine).run()
            rows.append(out)
            if (beside := back[at]) is not None:
                numbers.append(beside.new_empty(out.shape[0], self.k))
                pull_weights_launch(window, numbers[-1], self.indices[at], routed.place, homes).run()
        release(window, "pulled", window.answered)
        return rows, numbers
