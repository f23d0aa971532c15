"""Rows to their experts and back: copies by index, weighted sums in wide precision, and their gradients.

    take     out[n] = x[rows[n]]                                     permute; backward of a plain sum
    total    out[m] = sum over j of weights[m, j] y[place[m, j]]     unpermute, combine; backward of a copy
    weigh    dy[p] = weights[m, j] grad[m] and dw[m, j] = y[p] . grad[m] for p = place[m, j]: backward of combine, in one pass

Each program owns the rows that it writes and sums slots in their order: no atomics, the same bits at every run. Functions and
tables are those of `meshplan.ops.experts.routing`, which says what they compute. Rows may be waited for that peers still send.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshplan.kernels.experts.numbers import accumulator, check_dtype, machine_of, narrow, unit_stride
from meshplan.kernels.flags import await_all, await_flag
from meshplan.kernels.launch import Launch, Machine
from meshplan.ops.derivative import require_first
from meshplan.ops.experts.routing import Pairs

_ROWS, _WIDTH = 4, 1024
"""Rows of a program, and numbers of a row that it handles at a time: 16 bytes a thread and load, several of them under way."""


def expand(x: Tensor, pairs: Pairs) -> Tensor:
    """`routing.expand`: the row of every pair, [M, H] -> [N, H]."""
    check_dtype(x.dtype)
    return _Expand.apply(x, pairs)  # type: ignore[no-any-return]


def collect(y: Tensor, pairs: Pairs) -> Tensor:
    """`routing.collect`: the sum over the pairs of a row, [N, H] -> [M, H]."""
    check_dtype(y.dtype)
    return _Collect.apply(y, pairs)  # type: ignore[no-any-return]


def combine(y: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """`routing.combine`: the weighted sum over the pairs of a row, [N, H] and [M, k] -> [M, H] in the dtype of `y`."""
    check_dtype(y.dtype, weights.dtype)
    return _Combine.apply(y, weights, pairs)  # type: ignore[no-any-return]


class Flags(NamedTuple):
    """What says that rows have come: one of `flags`, int32, for `chunk` rows each, is at least `epoch` once these are there."""

    flags: Tensor
    chunk: int
    epoch: int


def take(x: Tensor, rows: Tensor, flags: Flags | None = None) -> Tensor:
    """x[rows], each row once `flags` say that it has come."""
    out = x.new_empty(rows.shape[0], x.shape[1])
    take_launch(unit_stride(x), rows, out, flags, machine_of(x.device)).run()
    return out


def total(y: Tensor, weights: Tensor | None, place: Tensor) -> Tensor:
    """The (weighted) sum of the pairs of each row."""
    out = y.new_empty(place.shape[0], y.shape[1])
    total_launch(unit_stride(y), weights, place, out, machine_of(y.device)).run()
    return out


def weigh(y: Tensor, weights: Tensor, place: Tensor, grad: Tensor, flags: Flags | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of `y` and of `weights`, from each row of `grad` once `flags` say that it has come."""
    dy, dw = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, weights))
    weigh_launch(unit_stride(y), weights, place, unit_stride(grad), dy, dw, flags, machine_of(y.device)).run()
    return dy, dw


def take_launch(x: Tensor, rows: Tensor, out: Tensor, flags: Flags | None, machine: Machine) -> Launch:
    arguments = {
        "x": x,
        "rows": rows,
        "out": out,
        "n": rows.shape[0],
        "width": x.shape[1],
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        **_flags(flags),
    }
    return _rows_launch(take_kernel, rows.shape[0], arguments, machine)


def total_launch(y: Tensor, weights: Tensor | None, place: Tensor, out: Tensor, machine: Machine) -> Launch:
    arguments = {
        "y": y,
        "weights": None if weights is None else weights.contiguous(),
        "place": place,
        "out": out,
        "m_rows": place.shape[0],
        "n": y.shape[0],
        "width": y.shape[1],
        "y_row": y.stride(0),
        "out_row": out.stride(0),
        "K": place.shape[1],
        "ACC": accumulator(y.dtype if weights is None else torch.promote_types(y.dtype, weights.dtype)),
        "WIDEN": machine.interpreted,
    }
    return _rows_launch(total_kernel, place.shape[0], arguments, machine)


def weigh_launch(
    y: Tensor,
    weights: Tensor,
    place: Tensor,
    grad: Tensor,
    dy: Tensor,
    dw: Tensor,
    flags: Flags | None,
    machine: Machine,
) -> Launch:
    arguments = {
        "y": y,
        "weights": weights.contiguous(),
        "place": place,
        "grad": grad,
        "dy": dy,
        "dw": dw,
        "n": y.shape[0],
        "width": y.shape[1],
        "y_row": y.stride(0),
        "grad_row": grad.stride(0),
        "dy_row": dy.stride(0),
        **_flags(flags),
        "K": place.shape[1],
        "KP": triton.next_power_of_2(place.shape[1]),
        "W": 16 if machine.interpreted else 512,
        "ACC": accumulator(torch.promote_types(y.dtype, weights.dtype)),
        "WIDEN": machine.interpreted,
    }
    return Launch(weigh_kernel, place.shape[0], arguments, 4, 2)


def _flags(flags: Flags | None) -> dict[str, Any]:
    if flags is None:
        return {"flags": None, "epoch": 0, "CHUNK": 1}
    return {"flags": flags.flags, "epoch": flags.epoch, "CHUNK": flags.chunk}


def _rows_launch(kernel: Any, rows: int, arguments: dict[str, Any], machine: Machine) -> Launch:
    r, w = (8, 16) if machine.interpreted else (_ROWS, _WIDTH)
    return Launch(kernel, triton.cdiv(rows, r), {**arguments, "R": r, "W": w}, 4, 2)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return take(x, pairs.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first("experts")
        return total(grad, None, ctx.pairs.place), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return total(y, None, pairs.place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first("experts")
        return take(grad, ctx.pairs.rows), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.pairs = pairs
        return total(y, weights, pairs.place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        require_first("experts")
        return *weigh(*ctx.saved_tensors, ctx.pairs.place, grad), None


@triton.jit(do_not_specialize=["n", "epoch"])
def take_kernel(
    x, rows, out, flags, n, width, x_row, out_row, epoch, CHUNK: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """R rows of `out`."""
    at = tl.program_id(0) * R + tl.arange(0, R)
    row = tl.load(rows + at, mask=at < n, other=0)
    if flags is not None:
        await_all(flags + row // CHUNK, epoch, at < n)
    source = x + row[:, None] * x_row
    target = out + at.to(tl.int64)[:, None] * out_row
    for start in range(0, width, W):
        c = start + tl.arange(0, W)[None, :]
        inside = (at < n)[:, None] & (c < width)
        tl.store(target + c, tl.load(source + c, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["m_rows", "n"])
def total_kernel(
    y, weights, place, out, m_rows, n, width, y_row, out_row,
    K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """R rows of `out`."""
    m = tl.program_id(0) * R + tl.arange(0, R)
    sum_rows(y, weights, place, out, m, m < m_rows, n, width, y_row, out_row, K, R, W, ACC, WIDEN)


@triton.jit
def sum_rows(
    y, weights, place, out, m, there, n, width, y_row, out_row,
    K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows m of `out`, those that are `there`: the (weighted) sums of their pairs."""
    target = out + m.to(tl.int64)[:, None] * out_row
    for start in range(0, width, W):
        c = start + tl.arange(0, W)[None, :]
        inside = there[:, None] & (c < width)
        sums = tl.zeros([R, W], ACC)
        for j in tl.static_range(K):
            p = tl.load(place + m * K + j, mask=there, other=n)
            x = tl.load(y + p[:, None] * y_row + c, mask=inside & (p < n)[:, None], other=0.0).to(ACC)
            if weights is not None:
                x *= tl.load(weights + m * K + j, mask=there, other=0.0).to(ACC)[:, None]
            sums += x
        tl.store(target + c, narrow(sums, out.dtype.element_ty, WIDEN), mask=inside)


@triton.jit(do_not_specialize=["n", "epoch"])
def weigh_kernel(
    y, weights, place, grad, dy, dw, flags, n, width, y_row, grad_row, dy_row, epoch, CHUNK: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The pairs of one row: each is read, and its gradient written, once."""
    m = tl.program_id(0).to(tl.int64)
    if flags is not None:
        await_flag(flags + m // CHUNK, epoch)
    j = tl.arange(0, KP)
    p = tl.load(place + m * K + j, mask=j < K, other=n)
    there = p < n
    weight = tl.load(weights + m * K + j, mask=j < K, other=0.0).to(ACC)
    dots = tl.zeros([KP], ACC)
    for start in range(0, width, W):
        c = start + tl.arange(0, W)
        inside = there[:, None] & (c < width)[None, :]
        g = tl.load(grad + m * grad_row + c, mask=c < width, other=0.0).to(ACC)[None, :]
        x = tl.load(y + p[:, None] * y_row + c[None, :], mask=inside, other=0.0).to(ACC)
        dots += tl.sum(x * g, 1)
        made = narrow(weight[:, None] * g, dy.dtype.element_ty, WIDEN)
        tl.store(dy + p[:, None] * dy_row + c[None, :], made, mask=inside)
    tl.store(dw + m * K + j, narrow(dots, dw.dtype.element_ty, WIDEN), mask=j < K)
