"""Broadcasts that a rank's code leaves out: a table of one row for all of a batch, where this rank's batch is one row.

    if batch_size != position_ids.shape[0]:  # 4 rows on one device, one on each of 4 ranks
        position_ids = position_ids.expand(batch_size, -1)

What the rank goes on with is its shard of the wider value, so it counts as both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from meshplan.compiler.capture import Call
from meshplan.compiler.kinds import Kind, replicated
from meshplan.compiler.known import Known
from meshplan.compiler.layout import Info, local_shape
from meshplan.plan.placements import Shard

BROADCASTS = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})


class Spared(Known):
    """The part of a propagation that passes over broadcasts which this rank's shapes make idle."""

    def spared(self, func: Callable[..., Any]) -> bool:
        """Whether the recorded calls from here to one of `func` are such broadcasts. If so, the trace stands there now."""
        calls, at = self.trace.calls, self.cursor
        seen: list[tuple[Info, int, list[Kind]]] = []
        while at < len(calls) and calls[at].func != func:
            found = self._idle(calls[at])
            if found is None:
                return False
            seen.append((found[0], calls[at].outs[0], found[1]))
            at += 1
        if not seen or at == len(calls):
            return False
        for info, value, kinds in seen:
            info.also[value] = kinds
        self.result.spared += range(self.cursor, at)
        self.cursor = at
        return True

    def seen_as(self, info: Info, value: int) -> None:
        """Count what was also `value` as that from now on."""
        info.also[info.value] = info.kinds
        info.value, info.kinds = value, info.also[value]

    def _idle(self, call: Call) -> tuple[Info, list[Kind]] | None:
        """What the call is made of on this rank, and the kinds that it has as the call's result."""
        if call.name not in BROADCASTS or call.in_place or not call.ins:
            return None
        info = self.valued.get(call.ins[0])
        given, made = self.trace.values[call.ins[0]], self.trace.values[call.outs[0]]
        # A gradient would be this rank's summand of what the broadcast sums: somebody would have to owe the reduction.
        if info is None or given.dim() != made.dim() or given.requires_grad:
            return None
        widened = [d for d in range(made.dim()) if given.shape[d] != made.shape[d]]
        kinds = list(info.kinds)
        for d in widened:
            split = self._splitting(made.shape[d], kinds)
            if given.shape[d] != 1 or split is None:
                return None
            for k in split:
                kinds[k] = Shard(d)
        same = local_shape(given.shape, info.kinds, self.axes) == local_shape(made.shape, kinds, self.axes)
        return (info, kinds) if same else None

    def _splitting(self, size: int, kinds: list[Kind]) -> tuple[int, ...] | None:
        """Data axes, free so far, that cut `size` to one."""
        free = [k for k, axis in enumerate(self.axes) if axis.data and replicated(kinds[k])]
        ways = (some for n in range(1, len(free) + 1) for some in itertools.combinations(free, n))
        return next((some for some in ways if math.prod(self.axes[k].degree for k in some) == size), None)
