"""What it costs to bring a value from one kind to another on an axis, forward and backward: the mates of `runtime.boundary`."""

from __future__ import annotations

from torch import Tensor

from meshplan.compiler.kinds import Kind, R
from meshplan.cost.machine import FREE, Cost, Link, Machine
from meshplan.plan.placements import Shard
from meshplan.runtime.boundary import MOVES, collectives_of

COPY = Machine.memory
"""Bytes/s of a copy in device memory: what local parts of a move cost."""


def letter(kind: Kind) -> str:
    return "S" if isinstance(kind, Shard) else str(kind)


def move_cost(
    t: Tensor, have: Kind, want: Kind, link: Link, param: bool = False, latency: bool = True, share: float = 1.0
) -> Cost | None:  # fmt: skip
    """Seconds and wire bytes of moving `t` (global shape), both directions; None where that is not done.

    Arguments:
        param: `t` is a parameter: sharded it is never gathered, and its gradient's reduction shares a bucket with others.
        latency: whether to count the time a collective takes however small it is.
        share: the part of `t` that one data rank has.
    """
    if have == want:
        return FREE
    src, dst = letter(have), letter(want)
    if isinstance(have, Shard) and have.copies > 1:
        # Each rank gives up all but its own share of what it has a copy of.
        if t.shape[have.dim] % link.ranks or (isinstance(want, Shard) and want.copies > 1) or param:
            return None
        return move_cost(t, Shard(have.dim), want, link, param, latency, share)
    if (isinstance(want, Shard) and (want.copies > 1 or want.parts)) or (isinstance(have, Shard) and have.parts):
        return None
    if param and src == "S":
        return None
    if isinstance(want, Shard) and t.shape[want.dim] < link.ranks:
        return None
    if src == "S" and dst == "S":
        # Through the full value, which is made and cut: never as good as making the right shards at once.
        through = move_cost(t, have, R, link, param, latency, share)
        return through + Cost(4 * share * t.nbytes / COPY) if through is not None else None
    if src in "IR" and dst == "P":
        return FREE if param else None  # kept on one rank; an activation made partial would flood what follows
    if not t.requires_grad and src == "I":
        return FREE if dst == "R" else Cost(share * t.nbytes / COPY)
    if (src, dst) not in MOVES:
        return None
    forward, backward = collectives_of(src, dst)
    nbytes = int(share * t.nbytes)
    # A slice is a copy, and its mate another one; nothing is quite free, so that nothing is moved without need.
    total = Cost((nbytes + (nbytes if t.requires_grad else 0)) / COPY)
    for op in filter(None, (forward, backward if t.requires_grad else None)):
        cost = link.cost(op, nbytes)
        total = total + (Cost(cost.seconds - cost.latency, cost.wire) if param or not latency else cost)
    return total
