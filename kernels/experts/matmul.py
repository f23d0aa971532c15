"""Grouped matmuls of rows that are sorted by expert: rows times weights, and sums over rows, each expert's by its own tiles.

    rows 0 1 2 | 3 4 | (none) | 5     tiles of 2 rows:  (expert 0, rows 0-2) (0, 2-3) (1, 3-5) (3, 5-6)

A tile never has rows of two experts: what it reads beyond its end is not written. As many programs as the machine has
processors take tile after tile, those of neighbouring rows together, so that an expert's weights are read from the cache. On
Hopper operands come through tensor descriptors (TMA) into wgmma; sums are float32 and rounded once.

The epilogue of an expert's first matmul makes the gated unit, and keeps gate and up for backward; that of the second one's
gradient makes theirs, and the unit again, so that neither passes through memory on its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshplan.kernels.experts.numbers import narrow
from meshplan.kernels.experts.unit import read_pair, unit, unit_gradients, write_pair, write_tile
from meshplan.kernels.flags import await_all

# What is done with a tile of products.
PLAIN = tl.constexpr(0)
UNIT = tl.constexpr(1)
UNIT_GRADIENTS = tl.constexpr(2)


@triton.jit
def _rows(a, r, row, k, rows, width, a_row, BM: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr):
    """[BM, BK] of `a`: rows r, or through a descriptor those from `row` on."""
    if TMA:
        x = a.load([row, k])
    else:
        c = k + tl.arange(0, BK)
        x = tl.load(a + r[:, None] * a_row + c[None, :], mask=(r < rows)[:, None] & (c < width)[None, :], other=0.0)
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit
def _weights(
    b, e, k, n, depth, width, b_e, b_k, b_n,
    BK: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of expert e's weights, which lie as [k, n] if TURNED, else as [n, k]."""
    if TMA:
        if TURNED:
            x = b.load([e, k, n]).reshape(BK, BN)
        else:
            x = b.load([e, n, k]).reshape(BN, BK).T
    else:
        i = k + tl.arange(0, BK)
        j = n + tl.arange(0, BN)
        start = b + tl.cast(e, tl.int64) * b_e + i.to(tl.int64)[:, None] * b_k + j.to(tl.int64)[None, :] * b_n
        x = tl.load(start, mask=(i < depth)[:, None] & (j < width)[None, :], other=0.0)
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(x.reshape(BM, 2, BN // 2).permute(0, 2, 1))


@triton.jit
def _quarters(x, BM: tl.constexpr, BN: tl.constexpr):
    """The columns of [BM, BN] in four parts."""
    left, right = _halves(x, BM, BN)
    a, b = _halves(left, BM, BN // 2)
    c, d = _halves(right, BM, BN // 2)
    return a, b, c, d


@triton.jit
def _unit(
    gate, up, h, out, row, end, n, width,
    BM: tl.constexpr, BN: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The unit's value, of gate and up as they are kept: backward then makes the same value again."""
    gate = narrow(gate, out.dtype.element_ty, WIDEN)
    up = narrow(up, out.dtype.element_ty, WIDEN)
    if h is not None:
        write_pair(h, gate, up, row, end, n, width, BM, BN, INTERLEAVED, WIDEN)
    value = unit(gate.to(tl.float32), up.to(tl.float32), CLAMPED)
    write_tile(out, value, row, end, n, width, width, BM, BN, WIDEN)


@triton.jit
def _unit_of_both(
    x, h, out, row, end, n, width, BM: tl.constexpr, BN: tl.constexpr, CLAMPED: tl.constexpr, WIDEN: tl.constexpr
):
    """The same of gate and up that alternate in [BM, 2 BN]."""
    gate, up = tl.split(x.reshape(BM, BN, 2))
    _unit(gate, up, h, out, row, end, n, width, BM, BN, True, CLAMPED, WIDEN)


@triton.jit
def _unit_gradients(
    grad, h, dh, out, row, end, n, width,
    BM: tl.constexpr, BN: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """From the gradient of the unit's value those of gate and up, and the value again."""
    gate, up = read_pair(h, row, end, n, width, BM, BN, INTERLEAVED)
    d_gate, d_up = unit_gradients(gate, up, grad, CLAMPED)
    write_tile(out, unit(gate, up, CLAMPED), row, end, n, width, width, BM, BN, WIDEN)
    write_pair(dh, d_gate, d_up, row, end, n, width, BM, BN, INTERLEAVED, WIDEN)


@triton.jit(do_not_specialize=["rows", "row_tiles", "epoch"])
def rows_kernel(
    a, b, bias, out, h, dh, index, flags, tiles,
    rows, row_tiles, depth, width, a_row, b_e, b_k, b_n, epoch,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TURNED: tl.constexpr, DO: tl.constexpr,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, CHUNK: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] weights of row i's expert (+ bias), what comes of it as DO says.

    Arguments:
        a: [rows, depth], or descriptor; with `index` row i is a[index[i]]; with `flags` that row is there once
            `flags[index[i] // CHUNK]` is at least `epoch`.
        b: weights [E, width, depth] or TURNED; twice as wide for UNIT: gate and up; bias: [E, that], or None.
        out: [N, width]: the products; for UNIT the unit's values; for UNIT_GRADIENTS the unit's values again.
        h: [N, 2 width]: gate and up; UNIT writes them (None: not), UNIT_GRADIENTS reads them and writes `dh`, their gradients.
        tiles: int32 [row_tiles, 3]: expert, first row, one past its last row.
    """
    PAIR: tl.constexpr = DO == UNIT
    BW: tl.constexpr = 2 * BN if PAIR and INTERLEAVED else BN
    TWO: tl.constexpr = PAIR and not INTERLEAVED
    full: tl.constexpr = 2 if PAIR else 1
    column_tiles = tl.cdiv(width, BN)
    for t in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        group = t // (GROUP * column_tiles)
        members = tl.minimum(row_tiles - group * GROUP, GROUP)
        inner = t % (GROUP * column_tiles)
        entry = tiles + (group * GROUP + inner % members) * 3
        n = inner // members * BN
        e = tl.load(entry)
        row = tl.load(entry + 1)
        end = tl.load(entry + 2)
        r = (row + tl.arange(0, BM)).to(tl.int64)
        if index is not None:
            r = tl.load(index + r, mask=r < end, other=rows)
            if flags is not None:
                await_all(flags + r // CHUNK, epoch, r < rows)
        acc = tl.zeros([BM, BW], tl.float32)
        acc2 = tl.zeros([BM, BW], tl.float32) if TWO else 0.0
        first = 2 * n if PAIR and INTERLEAVED else n
        for k in range(0, depth, BK):
            x = _rows(a, r, row, k, rows, depth, a_row, BM, BK, TMA_A, WIDEN)
            w = _weights(b, e, k, first, depth, full * width, b_e, b_k, b_n, BK, BW, TURNED, TMA_B, WIDEN)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            if TWO:
                w2 = _weights(b, e, k, width + n, depth, 2 * width, b_e, b_k, b_n, BK, BW, TURNED, TMA_B, WIDEN)
                acc2 = tl.dot(x, w2, acc2, input_precision=PRECISION)
        if bias is not None:
            c = first + tl.arange(0, BW)
            line = bias + tl.cast(e, tl.int64) * (full * width)
            acc += tl.load(line + c, mask=c < full * width, other=0.0).to(tl.float32)[None, :]
            if TWO:
                acc2 += tl.load(line + width + c, mask=c < width, other=0.0).to(tl.float32)[None, :]
        # What is made of a tile of products comes part after part: all of it does not fit into the registers.
        Q: tl.constexpr = BN // 4
        if TWO:
            _unit(acc, acc2, h, out, row, end, n, width, BM, BN, False, CLAMPED, WIDEN)
        elif PAIR:
            x1, x2, x3, x4 = _quarters(acc, BM, BW)
            _unit_of_both(x1, h, out, row, end, n, width, BM, Q, CLAMPED, WIDEN)
            _unit_of_both(x2, h, out, row, end, n + Q, width, BM, Q, CLAMPED, WIDEN)
            _unit_of_both(x3, h, out, row, end, n + 2 * Q, width, BM, Q, CLAMPED, WIDEN)
            _unit_of_both(x4, h, out, row, end, n + 3 * Q, width, BM, Q, CLAMPED, WIDEN)
        elif DO == UNIT_GRADIENTS:
            x1, x2, x3, x4 = _quarters(acc, BM, BN)
            _unit_gradients(x1, h, dh, out, row, end, n, width, BM, Q, INTERLEAVED, CLAMPED, WIDEN)
            _unit_gradients(x2, h, dh, out, row, end, n + Q, width, BM, Q, INTERLEAVED, CLAMPED, WIDEN)
            _unit_gradients(x3, h, dh, out, row, end, n + 2 * Q, width, BM, Q, INTERLEAVED, CLAMPED, WIDEN)
            _unit_gradients(x4, h, dh, out, row, end, n + 3 * Q, width, BM, Q, INTERLEAVED, CLAMPED, WIDEN)
        else:
            write_tile(out, acc, row, end, n, width, width, BM, BN, WIDEN)


@triton.jit
def _stretch(a, row, end, c, width, a_row, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr,
             WIDEN: tl.constexpr):  # fmt: skip
    """[BR, BC] of `a`: rows from `row` on, with CHECK zeros from `end` on: those are another expert's."""
    r = row + tl.arange(0, BR)
    if TMA:
        x = a.load([row, c])
        if CHECK:
            x = tl.where((r < end)[:, None], x, 0.0)
    else:
        j = c + tl.arange(0, BC)
        x = tl.load(a + r.to(tl.int64)[:, None] * a_row + j[None, :], mask=(r < end)[:, None] & (j < width)[None, :],
                    other=0.0)  # fmt: skip
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit(do_not_specialize=["tiles"])
def sums_kernel(
    a, b, out, starts, tiles, height, width, a_row, b_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over rows i of expert e of a[i]^T b[i], [E, height, width]; zeros for an expert without rows.

    Arguments:
        a: [N, height]; b: [N, width]; or their descriptors.
        starts: int32 [E + 1], first rows of the experts; tiles: E times the tiles of a matrix.
    """
    column_tiles = tl.cdiv(width, BN)
    each = tl.cdiv(height, BM) * column_tiles
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        e = t // each
        m = t % each // column_tiles * BM
        n = t % column_tiles * BN
        start = tl.load(starts + e)
        end = tl.load(starts + e + 1)
        whole = start + (end - start) // BK * BK
        acc = tl.zeros([BM, BN], tl.float32)
        for row in range(start, whole, BK):
            x = _stretch(a, row, end, m, height, a_row, BK, BM, TMA, False, WIDEN)
            y = _stretch(b, row, end, n, width, b_row, BK, BN, TMA, False, WIDEN)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        if whole < end:
            x = _stretch(a, whole, end, m, height, a_row, BK, BM, TMA, True, WIDEN)
            y = _stretch(b, whole, end, n, width, b_row, BK, BN, TMA, True, WIDEN)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        r = m + tl.arange(0, BM)
        c = n + tl.arange(0, BN)
        target = out + tl.cast(e, tl.int64) * height * width + r.to(tl.int64)[:, None] * width + c[None, :]
        inside = (r < height)[:, None] & (c < width)[None, :]
        tl.store(target, narrow(acc, out.dtype.element_ty, WIDEN), mask=inside)


@triton.jit
def columns_kernel(x, out, starts, width, x_row, R: tl.constexpr, W: tl.constexpr, WIDEN: tl.constexpr):
    """out[e] = sum of expert e's rows, W columns a program: the gradient of a bias."""
    chunks = tl.cdiv(width, W)
    e = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks * W + tl.arange(0, W)
    start = tl.load(starts + e)
    end = tl.load(starts + e + 1)
    sums = tl.zeros([W], tl.float32)
    for row in range(start, end, R):
        r = row + tl.arange(0, R)
        inside = (r < end)[:, None] & (c < width)[None, :]
        sums += tl.sum(
            tl.load(x + r.to(tl.int64)[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32), 0
        )
    tl.store(out + e * width + c, narrow(sums, out.dtype.element_ty, WIDEN), mask=c < width)
