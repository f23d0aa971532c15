"""What the attention kernels share: reading a tile, which tiles a tile sees, and which pairs inside two tiles."""

from __future__ import annotations

import triton
import triton.language as tl

# Scores are kept in base 2, so that exp2, which is one instruction, serves: exp(x) = exp2(x log2(e)).
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def read(
    source,
    b,
    h,
    row,
    rows,
    stride_b,
    stride_h,
    stride_l,
    width,
    COLUMN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    CHECK: tl.constexpr,
    PADDED: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """`source[b, h, row : row + R, COLUMN : COLUMN + W]`, with zeros for what lies outside.

    Arguments:
        source: a pointer; with TMA a tensor descriptor of block `[1, 1, R, W]`, which needs none of the strides.
        rows, width: sizes of the last two dims.
        CHECK: whether rows may lie outside; PADDED: whether columns may.
        WIDEN: to float32 at once: Triton's interpreter computes on the raw bits of bfloat16.
    """
    if TMA:
        x = source.load([b, h, row, COLUMN]).reshape(R, W)
    else:
        r = tl.arange(0, R)
        c = COLUMN + tl.arange(0, W)
        start = (
            source
            + tl.cast(b, tl.int64) * stride_b
            + tl.cast(h, tl.int64) * stride_h
            + tl.cast(row, tl.int64) * stride_l
        )
        pointers = start + r[:, None] * stride_l + c[None, :]
        if CHECK and PADDED:
            x = tl.load(pointers, mask=(row + r < rows)[:, None] & (c < width)[None, :], other=0.0)
        elif CHECK:
            x = tl.load(pointers, mask=(row + r < rows)[:, None], other=0.0)
        elif PADDED:
            x = tl.load(pointers, mask=(c < width)[None, :], other=0.0)
        else:
            x = tl.load(pointers)
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit
def write(
    target,
    value,
    b,
    h,
    row,
    rows,
    stride_b,
    stride_h,
    stride_l,
    width,
    COLUMN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
):
    """`target[b, h, row : row + R, COLUMN : COLUMN + W] = value`, or `+=`: this program alone owns these elements.

    Arguments as in `read`. A descriptor needs no pointers: as many as there are values would not fit beside them.
    """
    if TMA:
        if ADD:
            value += target.load([b, h, row, COLUMN]).reshape(R, W)
        target.store([b, h, row, COLUMN], value.reshape(1, 1, R, W))
    else:
        r = tl.arange(0, R)
        c = COLUMN + tl.arange(0, W)
        start = target + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
        pointers = start + tl.cast(row, tl.int64) * stride_l + r[:, None] * stride_l + c[None, :]
        inside = (row + r < rows)[:, None] & (c < width)[None, :]
        if ADD:
            value += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, value, mask=inside)


@triton.jit
def tiles_seen(
    row,
    rows,
    others,
    lo,
    hi,
    limits,
    T: tl.constexpr,
    U: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    DOCS: tl.constexpr,
):
    """Tiles of U others that the rows [row, row + T) see: (begin, a, z, end), in tiles.

    Row i sees other j only if `i + lo <= j` (if LO) and `j <= i + hi` (if HI), and only within `limits` (if DOCS: four
    integers that `document_limits` wrote for this tile of rows). Tiles in [a, z) are seen whole by every row; those in
    [begin, a) and [z, end) in part: there, and only there, `pairs` has to be asked.
    """
    first = 0
    last = others
    whole_first = 0
    whole_last = others
    end_row = tl.minimum(row + T, rows) - 1
    if LO:
        first = tl.maximum(first, row + lo)
        whole_first = tl.maximum(whole_first, end_row + lo)
    if HI:
        last = tl.minimum(last, end_row + hi + 1)
        whole_last = tl.minimum(whole_last, row + hi + 1)
    if DOCS:
        first = tl.maximum(first, tl.load(limits))
        last = tl.minimum(last, tl.load(limits + 1))
        whole_first = tl.maximum(whole_first, tl.load(limits + 2))
        whole_last = tl.minimum(whole_last, tl.load(limits + 3))
    begin = first // U
    end = tl.maximum((last + U - 1) // U, begin)
    end = tl.where(last > first, end, begin)
    a = tl.minimum(tl.maximum((whole_first + U - 1) // U, begin), end)
    z = tl.minimum(tl.maximum(tl.maximum(whole_last, 0) // U, a), end)
    return begin, a, z, end


@triton.jit
def pairs(i, j, rows_j, doc_i, doc_j, lo, hi, LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr):
    """Whether queries `i` see keys `j`, broadcast; `rows_j` is the number of keys: those beyond are of no document."""
    if DOCS:
        seen = doc_i == doc_j
    else:
        seen = j < rows_j
    if LO:
        seen = seen & (j >= i + lo)
    if HI:
        seen = seen & (j <= i + hi)
    return seen


@triton.jit
def documents(ids, b, row, rows, stride_b, NOBODY: tl.constexpr, T: tl.constexpr):
    """Document ids of rows [row, row + T); NOBODY for those outside and for negative ids, which see nothing."""
    at = row + tl.arange(0, T)
    found = tl.load(ids + tl.cast(b, tl.int64) * stride_b + at, mask=at < rows, other=-1)
    return tl.where(found < 0, NOBODY, found)


@triton.jit(do_not_specialize=["rows", "others", "tiles"])
def document_limits(ids, other_ids, out, ids_b, other_b, rows, others, tiles, T: tl.constexpr, CHUNK: tl.constexpr):
    """Per tile of T rows four integers of `out` `[B, tiles, 4]`: the others of its documents lie in [first, second).

    Those in [third, fourth) are each seen by each row of the tile, as far as documents go: where the tile lies in one
    document, and no other document stands between the others of it. Whatever the order of ids, the limits hold; in
    packed sequences they are tight.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    b = pid // tiles
    at = tile * T + tl.arange(0, T)
    mine = tl.load(ids + tl.cast(b, tl.int64) * ids_b + at, mask=at < rows, other=-1)
    low = tl.min(tl.where(mine < 0, 2147483647, mine), 0)
    high = tl.max(mine, 0)
    blind = tl.max(tl.where((at < rows) & (mine < 0), 1, 0), 0)
    first = others
    last = 0
    count = 0
    for start in range(0, others, CHUNK):
        where = start + tl.arange(0, CHUNK)
        theirs = tl.load(other_ids + tl.cast(b, tl.int64) * other_b + where, mask=where < others, other=-1)
        hit = (theirs >= low) & (theirs <= high) & (theirs >= 0)
        first = tl.minimum(first, tl.min(tl.where(hit, where, others), 0))
        last = tl.maximum(last, tl.max(tl.where(hit, where + 1, 0), 0))
        count += tl.sum(hit.to(tl.int32), 0)
    whole = (low == high) & (blind == 0) & (count == last - first)
    place = out + pid * 4
    tl.store(place, first)
    tl.store(place + 1, last)
    tl.store(place + 2, tl.where(whole, first, 0))
    tl.store(place + 3, tl.where(whole, last, 0))
