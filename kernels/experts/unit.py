"""The gated unit between an expert's two matmuls, inside the matmuls' epilogues: its value, its gradients, and its packing.

    silu      gate sigmoid(gate) up
    clamped   (up + 1) gate sigmoid(1.702 gate), gate at most 7, up within 7: gpt-oss' (`grouped.clamped_swiglu`)

Gate and up are one tensor [N, 2F], as halves (g g u u) or INTERLEAVED (g u g u).
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshplan.kernels.experts.numbers import narrow

ALPHA = tl.constexpr(1.702)
LIMIT = tl.constexpr(7.0)


@triton.jit
def unit(gate, up, CLAMPED: tl.constexpr):
    """The unit's value, in float32."""
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1
        value = up * gate * tl.sigmoid(gate * ALPHA)
    else:
        value = gate * tl.sigmoid(gate) * up
    return value


@triton.jit
def unit_gradients(gate, up, grad, CLAMPED: tl.constexpr):
    """The gradients of gate and up, where `grad` is that of the value. A clamp passes none beyond its bounds."""
    if CLAMPED:
        g = tl.minimum(gate, LIMIT)
        u = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1
        s = tl.sigmoid(g * ALPHA)
        d_gate = tl.where(gate <= LIMIT, grad * u * s * (1 + ALPHA * g * (1 - s)), 0.0)
        d_up = tl.where((up >= -LIMIT) & (up <= LIMIT), grad * g * s, 0.0)
    else:
        s = tl.sigmoid(gate)
        d_gate = grad * up * s * (1 + gate * (1 - s))
        d_up = grad * gate * s
    return d_gate, d_up


@triton.jit
def read_pair(h, row, end, n, width, BM: tl.constexpr, BN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up, float32 [BM, BN], of rows [row, end) and columns from n on of F = `width`."""
    r = row + tl.arange(0, BM)
    start = h + r.to(tl.int64)[:, None] * (2 * width)
    if INTERLEAVED:
        c = 2 * n + tl.arange(0, 2 * BN)
        x = tl.load(start + c[None, :], mask=(r < end)[:, None] & (c < 2 * width)[None, :], other=0.0).to(tl.float32)
        gate, up = tl.split(x.reshape(BM, BN, 2))
    else:
        c = n + tl.arange(0, BN)
        inside = (r < end)[:, None] & (c < width)[None, :]
        gate = tl.load(start + c[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(start + width + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def write_pair(
    h, gate, up, row, end, n, width, BM: tl.constexpr, BN: tl.constexpr, INTERLEAVED: tl.constexpr, WIDEN: tl.constexpr
):
    """Gate and up to their places."""
    if INTERLEAVED:
        write_tile(h, tl.interleave(gate, up), row, end, 2 * n, 2 * width, 2 * width, BM, 2 * BN, WIDEN)
    else:
        write_tile(h, gate, row, end, n, width, 2 * width, BM, BN, WIDEN)
        write_tile(h + width, up, row, end, n, width, 2 * width, BM, BN, WIDEN)


@triton.jit
def write_tile(out, x, row, end, n, width, out_row, BM: tl.constexpr, BN: tl.constexpr, WIDEN: tl.constexpr):
    """Rows [row, end) and columns from n on, below `width`, of `out`. The rows after `end` are another expert's."""
    r = row + tl.arange(0, BM)
    c = n + tl.arange(0, BN)
    target = out + r.to(tl.int64)[:, None] * out_row + c[None, :]
    tl.store(target, narrow(x, out.dtype.element_ty, WIDEN), mask=(r < end)[:, None] & (c < width)[None, :])
