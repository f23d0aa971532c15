"""What each dispatch sends: the calls one by one for the routing that happened, and the bytes that leave a rank.

T tokens on each of W ranks, k choices, rows of H numbers of b bytes, i the imbalance: rows of the busiest rank's experts over the
mean of all ranks (1 is even). Rows only (counts, indices and weights are k or E integers beside H numbers), each rank, expected
for experts that are chosen alike; what the busiest rank sends has i for 1 where its experts' rows leave it:

    alltoall    forward = backward = (1 + i) T k H b (W-1)/W
    dedup       forward = backward = (1 + i) T W (1 - (1 - 1/W)^k) H b (W-1)/W
    allgather   forward = backward = 2 (W-1) T H b

Rows that stay on their rank do not travel, although they are among the elements of an uneven all_to_all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.experts.contract import balanced
from meshplan.ops.experts.routing import sorted_slots
from meshplan.runtime.comm import AxisGroup

METHODS = ("alltoall", "dedup", "allgather")

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Routed:
    """One step's routing over the ranks of a group.

    Attributes:
        tokens: on each rank.
        counts: [n][E], choices of rank i's tokens for expert e.
        rows: [n][n], tokens of rank i with an expert on rank j.
        k, width: choices of a token, numbers in a row; with their dtypes, and that of the weights.
    """

    tokens: tuple[int, ...]
    counts: Table
    rows: Table
    k: int
    width: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    indices_dtype: torch.dtype = torch.int64

    @classmethod
    def of(
        cls, indices: Sequence[Tensor], experts: int, width: int, dtype: torch.dtype, weights_dtype: torch.dtype
    ) -> Routed:
        """What `indices` [T, k] of every rank, in rank order, amount to."""
        n = len(indices)
        owners = [torch.div(x, experts // n, rounding_mode="floor") for x in indices]
        return cls(
            tuple(x.shape[0] for x in indices),
            tuple(tuple(sorted_slots(x, experts)[1].tolist()) for x in indices),
            tuple(tuple(int((owner == j).any(1).sum()) for j in range(n)) for owner in owners),
            indices[0].shape[1],
            width,
            dtype,
            weights_dtype,
            indices[0].dtype,
        )

    @classmethod
    def even(
        cls,
        tokens: int,
        k: int,
        experts: int,
        ranks: int,
        rank: int,
        width: int,
        dtype: torch.dtype,
        weights_dtype: torch.dtype,
    ) -> Routed:
        """What shape-only ranks assume, as `rank` sees it: all ranks' tokens are routed as its own, as evenly as integers can
        be, and each rank sends it what it keeps."""
        told = balanced((tokens, k), experts, ranks, True)
        local = experts // ranks
        mine = tuple(count for row in told for count in row[1:])
        # Only its own columns are read of other ranks' rows, and they are equal.
        assert len(mine) == ranks * local
        return cls(
            (tokens,) * ranks, (mine,) * ranks, (tuple(row[0] for row in told),) * ranks, k, width, dtype, weights_dtype
        )


class Sent(NamedTuple):
    """A call, and how many of its elements leave this rank."""

    call: Call
    leave: int

    @property
    def bytes(self) -> int:
        assert self.call.dtype is not None
        return self.leave * self.call.dtype.itemsize


def sends(
    method: str,
    x: Routed,
    group: AxisGroup,
    *,
    phase: str = "forward",
    tokens_grad: bool = True,
    weights_grad: bool = True,
    equal: bool = False,
) -> list[Sent]:
    """What one `routed_experts` call makes this rank of `group` send in `phase` ("forward" or "backward"), in order.

    Arguments:
        method: alltoall, dedup or allgather.
        tokens_grad, weights_grad: which need a gradient (experts are taken to need one).
        equal: as in `routed_experts`.

    Raises:
        PlanError: `bad-value` for a method that is not known.
    """
    if method not in METHODS:
        raise PlanError(f"experts have no dispatch {method!r}", code="bad-value", legal=list(METHODS))
    if group.size == 1:
        return []
    if method == "allgather":
        return _allgather(x, group, phase, tokens_grad, weights_grad, equal)
    n, rank, local = group.size, group.rank, len(x.counts[0]) // group.size
    told = [[sum(row[j * local : (j + 1) * local]) for j in range(n)] for row in x.counts]
    rows = x.rows if method == "dedup" else told
    put, came, stays = sum(rows[rank]), sum(row[rank] for row in rows), rows[rank][rank]

    def deal(count: int, each: int, dtype: torch.dtype) -> Sent:
        return Sent(Call("all_to_all", group.axis, count * each, dtype), (count - stays) * each)

    integers = n * (local + 1) if method == "dedup" else n * local
    counts = Sent(Call("all_to_all", group.axis, integers, torch.int64), integers // n * (n - 1))
    out, home = deal(put, x.width, x.dtype), deal(came, x.width, x.dtype)
    if method == "alltoall":
        return [counts, out, home] if phase == "forward" else [out] + [home] * tokens_grad
    if phase == "forward":
        return [counts, deal(put, x.k, torch.int32), deal(put, x.k, x.weights_dtype), out, home]
    return [out] + [home] * tokens_grad + [deal(came, x.k, x.weights_dtype)] * weights_grad


def collectives(method: str, x: Routed, group: AxisGroup, **options: Any) -> list[Call]:
    """The calls of `sends`, same arguments."""
    return [sent.call for sent in sends(method, x, group, **options)]


def bytes_sent(method: str, x: Routed, group: AxisGroup, **options: Any) -> int:
    """Bytes that leave this rank, same arguments as `sends`."""
    return sum(sent.bytes for sent in sends(method, x, group, **options))


def expression(method: str) -> sympy.Expr:
    """Bytes of rows that the busiest rank sends each way, expected, in T, k, H, b, W and i (see above)."""
    T, k, H, b, W, i = sympy.symbols("T k H b W i")
    if method == "allgather":
        return 2 * (W - 1) * T * H * b
    each = k if method == "alltoall" else W * (1 - (1 - 1 / W) ** k)
    return (1 + i) * T * each * H * b * (W - 1) / W


def _allgather(
    x: Routed, group: AxisGroup, phase: str, tokens_grad: bool, weights_grad: bool, equal: bool
) -> list[Sent]:
    n, most = group.size, max(x.tokens)

    def ring(op: str, each: int, dtype: torch.dtype) -> Sent:
        return Sent(Call(op, group.axis, n * each, dtype), (n - 1) * each)

    rows, weights = (most * x.width, x.dtype), (most * x.k, x.weights_dtype)
    if phase == "forward":
        sizes = [] if equal else [ring("all_gather", 1, torch.int64)]
        chosen = ring("all_gather", most * x.k, x.indices_dtype)
        return [*sizes, chosen, ring("all_gather", *weights), ring("all_gather", *rows), ring("reduce_scatter", *rows)]
    back = [ring("all_gather", *rows)]
    return back + [ring("reduce_scatter", *rows)] * tokens_grad + [ring("reduce_scatter", *weights)] * weights_grad
