"""What each dispatch sends: the calls one by one for the routing that happened, and the bytes that leave a rank.

T tokens on each of W ranks, k choices, rows of H numbers of b bytes, i the imbalance: rows of the busiest rank's experts over the
mean of all ranks (1 is even). Rows only (counts, indices and weights are k or E integers beside H numbers), each rank, expected
for experts that are chosen alike; what the busiest rank sends has i for 1 where its experts' rows leave it:

    alltoall    forward = backward = (1 + i) T k H b (W-1)/W
    dedup       forward = backward = (1 + i) T W (1 - (1 - 1/W)^k) H b (W-1)/W
    allgather   forward = backward = 2 (W-1) T H b
    twolevel    forward = backward, O nodes of I ranks; plain inside a node has k for W (1 - (1 - 1/W)^k)
      across    (1 + i) T O (1 - (1 - 1/O)^k) H b (O-1)/O
      inside    (1 + i) T W (1 - (1 - 1/W)^k) H b (I-1)/I

A payload of 8 bits takes H + ceil(H/128) bytes for H b, forward, of the half of the rows that is dispatched.
Rows that stay on their rank do not travel, although they are among the elements of an uneven all_to_all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.experts.contract import Even
from meshplan.ops.experts.payload import packed_width
from meshplan.ops.experts.routing import sorted_slots
from meshplan.ops.experts.twolevel import Levels
from meshplan.runtime.comm import AxisGroup

METHODS = ("alltoall", "dedup", "allgather", "twolevel")

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Routed:
    """One step's routing over the ranks of a group.

    Attributes:
        tokens: on each rank.
        counts: [n][E], choices of rank i's tokens for expert e.
        rows: [n][n], tokens of rank i with an expert on rank j.
        k, width: choices of a token, numbers in a row; with their dtypes, and that of the weights.
        node_rows: [n][nodes], tokens of rank i with an expert in a node, if nodes were asked for.
        payload: as in `routed_experts`.
    """

    tokens: tuple[int, ...]
    counts: Table
    rows: Table
    k: int
    width: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    indices_dtype: torch.dtype = torch.int64
    node_rows: Table = ()
    payload: str | None = None

    @property
    def wire(self) -> tuple[int, torch.dtype]:
        """Numbers of a dispatched row, and their dtype."""
        return (self.width, self.dtype) if self.payload is None else (packed_width(self.width), torch.uint8)

    @classmethod
    def of(
        cls,
        indices: Sequence[Tensor],
        experts: int,
        width: int,
        dtype: torch.dtype,
        weights_dtype: torch.dtype,
        nodes: int | None = None,
    ) -> Routed:
        """What `indices` [T, k] of every rank, in rank order, amount to; of `nodes` nodes, if they are several."""

        def tokens_by(parts: int) -> Table:
            owners = [torch.div(x, experts // parts, rounding_mode="floor") for x in indices]
            return tuple(tuple(int((owner == j).any(1).sum()) for j in range(parts)) for owner in owners)

        return cls(
            tuple(x.shape[0] for x in indices),
            tuple(tuple(sorted_slots(x, experts)[1].tolist()) for x in indices),
            tokens_by(len(indices)),
            indices[0].shape[1],
            width,
            dtype,
            weights_dtype,
            indices[0].dtype,
            tokens_by(nodes) if nodes else (),
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
        nodes: int | None = None,
    ) -> Routed:
        """What shape-only ranks assume, as `rank` sees it: all ranks' tokens are routed as its own, as evenly as integers can
        be, and each rank sends it what it keeps."""
        even = Even.of(tokens, k, experts, ranks)
        rows = tuple(row[0] for row in even.rows_by_rank(ranks))
        over = tuple(row[0] for row in Even.of(tokens, k, experts, nodes).rows_by_rank(nodes)) if nodes else ()
        # Only its own columns are read of other ranks' rows, and they are equal.
        return cls(
            (tokens,) * ranks, (even.counts,) * ranks, (rows,) * ranks, k, width, dtype, weights_dtype,
            node_rows=(over,) * ranks,
        )  # fmt: skip

    def across(self, outer: AxisGroup, inner: AxisGroup) -> Routed:
        """What is sent over `outer` by the ranks at this one's place in their nodes: `rows` are by node."""
        places = [o * inner.size + inner.rank for o in range(outer.size)]
        pick = lambda table: tuple(table[i] for i in places)  # noqa: E731
        return replace(self, tokens=pick(self.tokens), counts=pick(self.counts), rows=pick(self.node_rows))

    def within(self, outer: AxisGroup, inner: AxisGroup) -> Routed:
        """What the ranks of this node deal out inside it, when rows have come over `outer`."""
        size, local = inner.size, len(self.counts[0]) // outer.size
        came = [[o * size + i for o in range(outer.size)] for i in range(size)]
        experts = slice(outer.rank * local, (outer.rank + 1) * local)
        ranks = slice(outer.rank * size, (outer.rank + 1) * size)
        return replace(
            self,
            tokens=tuple(sum(self.node_rows[r][outer.rank] for r in place) for place in came),
            counts=tuple(_added(self.counts[r][experts] for r in place) for place in came),
            rows=tuple(_added(self.rows[r][ranks] for r in place) for place in came),
            indices_dtype=torch.int32,
        )


def _added(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


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
    levels: Levels | None = None,
    dedup: bool = True,
) -> list[Sent]:
    """What one `routed_experts` call makes this rank of `group` send in `phase` ("forward" or "backward"), in order.

    Arguments:
        method: alltoall, dedup, allgather or twolevel.
        tokens_grad, weights_grad: which need a gradient (experts are taken to need one).
        equal: as in `routed_experts`.
        levels, dedup: for twolevel, as there; `x` knows the nodes then.

    Raises:
        PlanError: `bad-value` for a method that is not known.
    """
    if method not in METHODS or (method == "twolevel") != (levels is not None):
        raise PlanError(
            f"experts have no dispatch {method!r}" + ("" if levels is None else " with levels"),
            code="bad-value",
            legal=list(METHODS),
        )
    if group.size == 1:
        return []
    if method == "allgather":
        return _allgather(x, group, phase, tokens_grad, weights_grad, equal)
    grads = (tokens_grad, weights_grad)
    if levels is not None:
        outer, inner = levels
        if min(outer.size, inner.size) > 1:
            return _twolevel(x, levels, phase, grads, dedup)
        group, plain = (inner, not dedup) if outer.size == 1 else (outer, False)
    else:
        plain = method == "alltoall"
    if plain:
        return _plain(x, group, phase, tokens_grad)
    out, home = _once(x, group, phase, grads, len(x.counts[0]) // group.size)
    return out + home


def _deal(group: AxisGroup, rows: Table, each: int, dtype: torch.dtype, home: bool = False) -> Sent:
    """Rows [n][n] to where they belong, or back `home`."""
    mine = [row[group.rank] for row in rows] if home else rows[group.rank]
    return Sent(Call("all_to_all", group.axis, sum(mine) * each, dtype), (sum(mine) - mine[group.rank]) * each)


def _counts(group: AxisGroup, each: int) -> Sent:
    return Sent(Call("all_to_all", group.axis, group.size * each, torch.int64), (group.size - 1) * each)


def _plain(x: Routed, group: AxisGroup, phase: str, tokens_grad: bool) -> list[Sent]:
    n, local = group.size, len(x.counts[0]) // group.size
    rows = tuple(tuple(sum(row[j * local : (j + 1) * local]) for j in range(n)) for row in x.counts)
    out, home = (_deal(group, rows, x.width, x.dtype, home) for home in (False, True))
    if phase == "forward":
        return [_counts(group, local), _deal(group, rows, *x.wire), home]
    return [out] + [home] * tokens_grad


def _once(
    x: Routed, group: AxisGroup, phase: str, grads: tuple[bool, bool], told: int
) -> tuple[list[Sent], list[Sent]]:
    """The calls before and after the answers are made (in backward, their gradients)."""
    out, home = (_deal(group, x.rows, x.width, x.dtype, home) for home in (False, True))
    if phase == "forward":
        beside = [_deal(group, x.rows, x.k, dtype) for dtype in (torch.int32, x.weights_dtype)]
        return [_counts(group, told + 1), *beside, _deal(group, x.rows, *x.wire)], [home]
    return [out], [home] * grads[0] + [_deal(group, x.rows, x.k, x.weights_dtype, True)] * grads[1]


def _twolevel(x: Routed, levels: Levels, phase: str, grads: tuple[bool, bool], dedup: bool) -> list[Sent]:
    outer, inner = levels
    check = [Sent(Call("all_reduce", inner.axis, 1, torch.int64), 2 * (inner.size - 1) // inner.size)]
    before, after = _once(x.across(outer, inner), outer, phase, grads, 0)
    inside = x.within(outer, inner)
    if dedup:
        there, back = _once(inside, inner, phase, grads, len(inside.counts[0]) // inner.size)
        between = there + back
    else:
        between = _plain(inside, inner, phase, grads[0])
    return check * (phase == "forward") + before + between + after


def collectives(method: str, x: Routed, group: AxisGroup, **options: Any) -> list[Call]:
    """The calls of `sends`, same arguments."""
    return [sent.call for sent in sends(method, x, group, **options)]


def bytes_sent(method: str, x: Routed, group: AxisGroup, **options: Any) -> int:
    """Bytes that leave this rank, same arguments as `sends`."""
    return sum(sent.bytes for sent in sends(method, x, group, **options))


def expression(method: str) -> sympy.Expr:
    """Bytes of rows that the busiest rank sends each way, expected, in T, k, H, b, W and i (see above). Also of `across`, in O
    for W: what `twolevel` sends to other nodes; and of `inside` and `inside plain`, in I too: what it then sends within."""
    T, k, H, b, W, i, O, I = sympy.symbols("T k H b W i O I")
    if method == "allgather":
        return 2 * (W - 1) * T * H * b
    if method == "twolevel":
        return expression("across") + expression("inside")
    n = {"across": O, "inside": I, "inside plain": I}.get(method, W)
    spread = O if method == "across" else W
    each = k if method in ("alltoall", "inside plain") else spread * (1 - (1 - 1 / spread) ** k)
    return (1 + i) * T * each * H * b * (n - 1) / n


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
        gathers = [chosen, ring("all_gather", *weights), ring("all_gather", most * x.wire[0], x.wire[1])]
        return [*sizes, *gathers, ring("reduce_scatter", *rows)]
    back = [ring("all_gather", *rows)]
    return back + [ring("reduce_scatter", *rows)] * tokens_grad + [ring("reduce_scatter", *weights)] * weights_grad
