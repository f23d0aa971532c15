"""Rows to their experts and back: copies by index, weighted sums in wide precision, and their gradients.

    take     out[n] = x[rows[n]]                                     permute; backward of a plain sum
    total    out[m] = sum over j of weights[m, j] y[place[m, j]]     unpermute, combine; backward of a copy
    weigh    dy[p] = weights[m, j] grad[m] and dw[m, j] = y[p] . grad[m] for p = place[m, j]: backward of combine, in one pass

Each program owns the rows that it writes and sums slots in their order: no atomics, the same bits at every run. Functions and
tables are those of `meshplan.ops.experts.routing`, which says what they compute. Results may be written into memory of the
caller's, such as a window that peers read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshplan.kernels.experts.numbers import accumulator, check_dtype, machine_of, narrow
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


def take(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """x[rows], into `out` if given."""
    out = x.new_empty(rows.shape[0], x.shape[1]) if out is None else out
    take_launch(_unit(x), rows, out, machine_of(x.device)).run()
    return out


def total(y: Tensor, weights: Tensor | None, place: Tensor, out: Tensor | None = None) -> Tensor:
    """The (weighted) sum of the pairs of each row, into `out` if given."""
    out = y.new_empty(place.shape[0], y.shape[1]) if out is None else out
    total_launch(_unit(y), weights, place, out, machine_of(y.device)).run()
    return out


def weigh(y: Tensor, weights: Tensor, place: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `y` and of `weights`."""
    dy, dw = torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty_like(weights)
    weigh_launch(_unit(y), weights, place, _unit(grad), dy, dw, machine_of(y.device)).run()
    return dy, dw


def take_launch(x: Tensor, rows: Tensor, out: Tensor, machine: Machine) -> Launch:
    arguments = {
        "x": x,
        "rows": rows,
        "out": out,
        "n": rows.shape[0],
        "width": x.shape[1],
        "x_row": x.stride(0),
        "out_row": out.stride(0),
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
    y: Tensor, weights: Tensor, place: Tensor, grad: Tensor, dy: Tensor, dw: Tensor, machine: Machine
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
        "K": place.shape[1],
        "KP": triton.next_power_of_2(place.shape[1]),
        "W": 16 if machine.interpreted else 512,
        "ACC": accumulator(torch.promote_types(y.dtype, weights.dtype)),
        "WIDEN": machine.interpreted,
    }
    return Launch(weigh_kernel, place.shape[0], arguments, 4, 2)


def _rows_launch(kernel: Any, rows: int, arguments: dict[str, Any], machine: Machine) -> Launch:
    r, w = (8, 16) if machine.interpreted else (_ROWS, _WIDTH)
    return Launch(kernel, triton.cdiv(rows, r), {**arguments, "R": r, "W": w}, 4, 2)


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


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


@triton.jit(do_not_specialize=["n"])
def take_kernel(x, rows, out, n, width, x_row, out_row, R: tl.constexpr, W: tl.constexpr):
    """R rows of `out`."""
    at = tl.program_id(0) * R + tl.arange(0, R)
    source = x + tl.load(rows + at, mask=at < n, other=0)[:, None] * x_row
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
    target = out + m.to(tl.int64)[:, None] * out_row
    for start in range(0, width, W):
        c = start + tl.arange(0, W)[None, :]
        inside = (m < m_rows)[:, None] & (c < width)
        sums = tl.zeros([R, W], ACC)
        for j in tl.static_range(K):
            p = tl.load(place + m * K + j, mask=m < m_rows, other=n)
            x = tl.load(y + p[:, None] * y_row + c, mask=inside & (p < n)[:, None], other=0.0).to(ACC)
            if weights is not None:
                x *= tl.load(weights + m * K + j, mask=m < m_rows, other=0.0).to(ACC)[:, None]
            sums += x
        tl.store(target + c, narrow(sums, out.dtype.element_ty, WIDEN), mask=inside)


@triton.jit(do_not_specialize=["n"])
def weigh_kernel(
    y, weights, place, grad, dy, dw, n, width, y_row, grad_row, dy_row,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The pairs of one row: each is read, and its gradient written, once."""
    m = tl.program_id(0).to(tl.int64)
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
