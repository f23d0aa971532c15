"""What attention launches, as values: which kernel, on how many programs, with which arguments. Made here, run by `block`.

Nothing here touches a device, so that what a GPU would run can be compiled and counted where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshplan.errors import PlanError
from meshplan.kernels.attention.backward import delta_kernel, dkdv_kernel, dq_kernel
from meshplan.kernels.attention.forward import finish_kernel, forward_kernel
from meshplan.kernels.attention.tile import document_limits
from meshplan.kernels.attention.tiles import (
    INTERPRETED,
    Kind,
    Tiles,
    Width,
    splits_backward,
    tiles_for,
    width_of,
)
from meshplan.kernels.launch import Launch, Machine
from meshplan.ops.attention.block import Span, State

_LOG2E = 1.4426950408889634
_ROWS = 64
"""Rows a program of `finish` and `delta` takes."""


@dataclass(frozen=True)
class Docs:
    """Document ids of the queries and of the keys of a block, [B, Lq] and [B, Lk]."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True)
class Limits:
    """A `Span` in the block's own counting: query i sees keys i + lo to i + hi; None where that limits nothing."""

    lo: int | None
    hi: int | None

    def rows(self, rows: int, others: int) -> tuple[int, int]:
        """First and one past the last of `rows` that see any of `others`."""
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            return (0, 0)
        first = 0 if self.hi is None else max(0, -self.hi)
        stop = rows if self.lo is None else min(rows, others - self.lo)
        return (first, stop) if first < stop and others else (0, 0)

    def turned(self) -> Limits:
        """The same, asked by the keys."""
        return Limits(None if self.hi is None else -self.hi, None if self.lo is None else -self.lo)


def limits(span: Span, lq: int, lk: int) -> Limits:
    """What `span` says of `lq` queries and `lk` keys. A bound that no pair of them meets is none at all."""
    ahead = span.q_start - span.k_start
    lo = None if span.left is None else ahead - span.left
    hi = None if span.right is None else ahead + span.right
    return Limits(
        None if lo is None or lo + lq - 1 <= 0 else min(lo, lk),
        None if hi is None or hi >= lk - 1 else max(hi, -lq),
    )


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float, state: State, docs: Docs | None, machine: Machine
) -> Iterator[Launch]:
    """What folds a key block into `state`: nothing where `span` shows that no pair sees each other."""
    q, k, v = _unit(q), _unit(k), _unit(v)
    block = _Block.of(q, k, v, (state.acc,), scale, docs, machine)
    tiles = block.tiles("forward")
    reach = limits(span, block.lq, block.lk)
    first, count = _tile_range(*reach.rows(block.lq, block.lk), tiles.queries)
    if not count:
        return
    found = yield from _document_limits(docs and docs.q, docs and docs.k, tiles.queries)
    _in_place(state.acc, state.m, state.l)
    if state.m.stride() != state.l.stride():
        raise PlanError("m and l of a state are laid out apart", code="attention-kernel", legal="equal strides")
    arguments = {
        **block.operands(tiles, q=q, k=k, v=v, acc=state.acc),
        "m": state.m,
        "l": state.l,
        "m_b": state.m.stride(0),
        "m_h": state.m.stride(1),
        "heads": block.heads,
        "first": first,
        "tiles": count,
        **block.rest(reach, found, tiles),
    }
    yield Launch(forward_kernel, count * block.batch * block.heads, arguments, tiles.warps, tiles.stages)


def finish_launch(state: State, out: Tensor, lse: Tensor, sink: Tensor | None) -> Launch:
    """The division at the end."""
    batch, heads, rows, dv = state.acc.shape
    count = triton.cdiv(rows, _ROWS)
    arguments = {
        "acc": state.acc,
        "m": state.m,
        "l": state.l,
        "sink": sink,
        "out": out,
        "lse": lse,
        **_strides("acc", state.acc),
        "m_b": state.m.stride(0),
        "m_h": state.m.stride(1),
        **_strides("out", out),
        "lse_b": lse.stride(0),
        "lse_h": lse.stride(1),
        "heads": heads,
        "tiles": count,
        "rows": rows,
        "dv": dv,
        "SINK": sink is not None,
        "R": _ROWS,
        "W": triton.next_power_of_2(dv),
    }
    return Launch(finish_kernel, count * batch * heads, arguments, 4, 1)


def delta_launch(out: Tensor, dout: Tensor, delta: Tensor) -> Launch:
    """Row sums of out dout."""
    batch, heads, rows, dv = out.shape
    count = triton.cdiv(rows, _ROWS)
    arguments = {
        "out": out,
        "dout": dout,
        "delta": delta,
        **_strides("out", out),
        **_strides("dout", dout),
        "delta_b": delta.stride(0),
        "delta_h": delta.stride(1),
        "heads": heads,
        "tiles": count,
        "rows": rows,
        "dv": dv,
        "R": _ROWS,
        "W": triton.next_power_of_2(dv),
    }
    return Launch(delta_kernel, count * batch * heads, arguments, 4, 1)


def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    span: Span,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    docs: Docs | None,
    machine: Machine,
) -> Iterator[Launch]:
    """What adds one block's share to dq, dk and dv: nothing where no pair sees each other."""
    q, k, v, dout = _unit(q), _unit(k), _unit(v), _unit(dout)
    block = _Block.of(q, k, v, (dout, dq, dk, dv), scale, docs, machine)
    reach = limits(span, block.lq, block.lk)
    _in_place(dq, dk, dv, lse, delta)
    shared = {
        "lse": lse,
        "delta": delta,
        "lse_b": lse.stride(0),
        "lse_h": lse.stride(1),
        "delta_b": delta.stride(0),
        "delta_h": delta.stride(1),
        "scale": scale,
    }
    both: list[Kind] = ["dk", "dv"] if splits_backward(block.d.total + block.v.total) else ["dkdv"]
    for kind in both:
        tiles = block.tiles(kind)
        first, count = _tile_range(*reach.turned().rows(block.lk, block.lq), tiles.keys)
        if not count:
            return
        found = yield from _document_limits(docs and docs.k, docs and docs.q, tiles.keys)
        arguments = {
            **block.operands(tiles, q=q, k=k, v=v, dout=dout, dk=dk, dv_out=dv),
            **shared,
            "heads": block.kv_heads,
            "first": first,
            "tiles": count,
            "DK": kind != "dv",
            "DV": kind != "dk",
            **block.rest(reach, found, tiles),
        }
        yield Launch(dkdv_kernel, count * block.batch * block.kv_heads, arguments, tiles.warps, tiles.stages)
    tiles = block.tiles("dq")
    first, count = _tile_range(*reach.rows(block.lq, block.lk), tiles.queries)
    found = yield from _document_limits(docs and docs.q, docs and docs.k, tiles.queries)
    arguments = {
        **block.operands(tiles, q=q, k=k, v=v, dout=dout, dq=dq),
        **shared,
        "heads": block.heads,
        "first": first,
        "tiles": count,
        **block.rest(reach, found, tiles),
    }
    yield Launch(dq_kernel, count * block.batch * block.heads, arguments, tiles.warps, tiles.stages)


@dataclass(frozen=True)
class _Block:
    """Sizes of one pair of blocks, and how its tensors are read: through descriptors if `tma`."""

    batch: int
    heads: int
    kv_heads: int
    lq: int
    lk: int
    d: Width
    v: Width
    dims: tuple[int, int]
    dtype: torch.dtype
    scale: float
    docs: Docs | None
    tma: bool
    machine: Machine

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        others: tuple[Tensor, ...],
        scale: float,
        docs: Docs | None,
        machine: Machine,
    ) -> _Block:
        batch, heads, lq, d = q.shape
        dv = v.shape[3]
        if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
            raise PlanError(
                f"the attention kernels got {q.dtype}, {k.dtype} and {v.dtype}",
                code="attention-kernel",
                legal="bfloat16, float16 or float32, the same for queries, keys and values",
            )
        if heads % k.shape[1] or k.shape[1] != v.shape[1]:
            raise PlanError(
                f"attention has {heads} query heads and {k.shape[1]} key and {v.shape[1]} value heads",
                code="attention-heads",
                legal="key and value heads that divide the query heads",
            )
        if not scale > 0:
            raise PlanError(f"attention scales its scores by {scale}", code="attention-kernel", legal="a scale above 0")
        tma = machine.hopper and all(_describable(x) for x in (q, k, v, *others))
        sizes = (batch, heads, k.shape[1], lq, k.shape[2], width_of(d), width_of(dv), (d, dv))
        return _Block(*sizes, q.dtype, scale, docs, tma, machine)

    def tiles(self, kind: Kind) -> Tiles:
        if self.machine.interpreted:
            return INTERPRETED
        widest = max(self.d.total, self.v.total)
        return tiles_for(kind, widest, self.dtype.itemsize, self.docs is not None, self.tma)

    def operands(self, tiles: Tiles, **tensors: Tensor) -> dict[str, Any]:
        """Pointers or descriptors of tensors [B, H, L, D], each in one or two parts of its head dim, and their strides."""
        rows = {"q": tiles.queries, "dout": tiles.queries, "acc": tiles.queries, "dq": tiles.queries}
        widths = dict.fromkeys(("q", "k", "dq", "dk"), self.d)
        arguments: dict[str, Any] = {"TMA": self.tma}
        for name, x in tensors.items():
            height, width = rows.get(name, tiles.keys), widths.get(name, self.v)
            arguments[name] = _descriptor(x, height, width.main) if self.tma else x
            arguments[f"{name}_rest"] = (
                None if not width.rest else _descriptor(x, height, width.rest) if self.tma else x
            )
            arguments.update({f"{name}_{dim}": x.stride(at) for at, dim in enumerate("bhl")})
        return arguments

    def rest(self, reach: Limits, found: Tensor | None, tiles: Tiles) -> dict[str, Any]:
        """The arguments that every kernel over pairs takes."""
        docs = self.docs
        precision = "tf32x3" if self.machine.tf32x3 and self.dtype == torch.float32 else "ieee"
        return {
            "q_docs": None if docs is None else docs.q,
            "k_docs": None if docs is None else docs.k,
            "limits": found,
            "q_docs_b": 0 if docs is None else docs.q.stride(0),
            "k_docs_b": 0 if docs is None else docs.k.stride(0),
            "group": self.heads // self.kv_heads,
            "all_tiles": 0 if found is None else found.shape[1],
            "q_rows": self.lq,
            "k_rows": self.lk,
            "lo": reach.lo or 0,
            "hi": reach.hi or 0,
            "scale_log2": self.scale * _LOG2E,
            "d": self.dims[0],
            "dv": self.dims[1],
            "LO": reach.lo is not None,
            "HI": reach.hi is not None,
            "DOCS": docs is not None,
            "BM": tiles.queries,
            "BN": tiles.keys,
            "D0": self.d.main,
            "D1": self.d.rest,
            "V0": self.v.main,
            "V1": self.v.rest,
            "PADDED": (self.d.total, self.v.total) != self.dims,
            "WIDEN": self.machine.interpreted,
            "PRECISION": precision,
        }


def _document_limits(rows: Tensor | None, others: Tensor | None, tile: int) -> Iterator[Launch]:
    """Launches what finds, for each tile of rows, the others of its documents; returns where that is written."""
    if rows is None or others is None:
        return None
    count = triton.cdiv(rows.shape[1], tile)
    out = torch.empty(rows.shape[0], count, 4, dtype=torch.int32, device=rows.device)
    arguments = {
        "ids": rows,
        "other_ids": others,
        "out": out,
        "ids_b": rows.stride(0),
        "other_b": others.stride(0),
        "rows": rows.shape[1],
        "others": others.shape[1],
        "tiles": count,
        "T": tile,
        "CHUNK": 1024,
    }
    yield Launch(document_limits, rows.shape[0] * count, arguments, 4, 1)
    return out


def _tile_range(first: int, stop: int, tile: int) -> tuple[int, int]:
    """The tiles that hold rows [first, stop): the first of them, and how many."""
    return first // tile, triton.cdiv(stop, tile) - first // tile if stop > first else 0


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{dim}": x.stride(at) for at, dim in enumerate("bhl")}


def _in_place(*targets: Tensor) -> None:
    for x in targets:
        if x.dtype != torch.float32 or x.stride(-1) != 1:
            raise PlanError(
                f"the attention kernels keep sums in float32 with unit stride, and got {x.dtype} with {x.stride()}",
                code="attention-kernel",
                legal="states and gradients as `new_state` and `torch.zeros` make them, or slices of their rows",
            )


def _describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can stand for `x`: 16-byte steps from a 16-byte boundary."""
    steps = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in steps)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    # The step of a dim of one element is never taken, but has to be legal.
    unit = 16 // x.element_size()
    strides = [s if n > 1 else max(unit, s // unit * unit) for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns])
