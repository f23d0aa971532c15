"""Flash attention backward over one (query block, key block) pair, from the whole row's log-sum-exp.

With p = exp(s - lse), g = dout v^T and delta = rowsum(out dout):

    ds = p (g - delta)      dq = scale ds k      dk = scale ds^T q      dv = p^T dout

One kernel owns tiles of keys and sums over queries (dk, dv), the other owns tiles of queries and sums over keys (dq).
Each element of a gradient has one owner that adds to it in one order: no atomics, equal bits at every run. Where dk and
dv do not fit into registers together (head dim 256) the first kernel runs twice, once for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshplan.kernels.attention.tile import LOG2E, documents, pairs, read, tiles_seen, write


@triton.jit(do_not_specialize=["tiles", "rows"])
def delta_kernel(
    out, dout, delta, out_b, out_h, out_l, dout_b, dout_h, dout_l, delta_b, delta_h, heads, tiles, rows, dv,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """delta = sum of out dout over the head dim, in float32."""
    pid = tl.program_id(0)
    row = (pid % tiles) * R
    b = pid // tiles // heads
    h = pid // tiles % heads
    x = read(out, b, h, row, rows, out_b, out_h, out_l, dv, 0, R, W, True, True, False, True)
    y = read(dout, b, h, row, rows, dout_b, dout_h, dout_l, dv, 0, R, W, True, True, False, True)
    r = row + tl.arange(0, R)
    tl.store(
        delta + tl.cast(b, tl.int64) * delta_b + tl.cast(h, tl.int64) * delta_h + r, tl.sum(x * y, 1), mask=r < rows
    )


@triton.jit
def _row_lse(lse, at, inside):
    """lse in base 2; +inf for rows that saw nothing or lie outside: exp2(s - inf) = 0, whatever s."""
    x = tl.load(lse + at, mask=inside, other=float("inf")) * LOG2E
    return tl.where(x == float("-inf"), float("inf"), x)


@triton.jit
def _by_key(
    dk0, dk1, dv0, dv1,
    k0, k1, v0, v1, q, q_rest, dout, dout_rest, lse, delta, b, h, row, n, q_rows, k_rows,
    q_b, q_h, q_l, dout_b, dout_h, dout_l, lse_b, lse_h, delta_b, delta_h, d, dv,
    q_docs, q_docs_b, doc_k, lo, hi, scale_log2,
    MASKED: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile, beginning at query `row`, added to dk and dv of the keys from n on; tiles of scores are [BN, BM]."""
    q0 = read(q, b, h, row, q_rows, q_b, q_h, q_l, d, 0, BM, D0, MASKED, PADDED, TMA, WIDEN)
    q1 = 0
    s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
    if D1:
        q1 = read(q_rest, b, h, row, q_rows, q_b, q_h, q_l, d, D0, BM, D1, MASKED, PADDED, TMA, WIDEN)
        s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
    i = row + tl.arange(0, BM)
    x = _row_lse(lse, tl.cast(b, tl.int64) * lse_b + tl.cast(h, tl.int64) * lse_h + i, i < q_rows)
    if MASKED:
        doc_q = 0
        if DOCS:
            doc_q = documents(q_docs, b, row, q_rows, q_docs_b, -1, BM)[None, :]
        j = n + tl.arange(0, BN)
        seen = pairs(i[None, :], j[:, None], k_rows, doc_q, doc_k[:, None] if DOCS else 0, lo, hi, LO, HI, DOCS)
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s * scale_log2 - x[None, :])
    do0 = read(dout, b, h, row, q_rows, dout_b, dout_h, dout_l, dv, 0, BM, V0, MASKED, PADDED, TMA, WIDEN)
    do1 = 0
    if V1:
        do1 = read(dout_rest, b, h, row, q_rows, dout_b, dout_h, dout_l, dv, V0, BM, V1, MASKED, PADDED, TMA, WIDEN)
    if DV:
        rounded = p.to(do0.dtype)
        dv0 = tl.dot(rounded, do0, dv0, input_precision=PRECISION)
        if V1:
            dv1 = tl.dot(rounded, do1, dv1, input_precision=PRECISION)
    if DK:
        g = tl.dot(v0, tl.trans(do0), input_precision=PRECISION)
        if V1:
            g = tl.dot(v1, tl.trans(do1), g, input_precision=PRECISION)
        at = tl.cast(b, tl.int64) * delta_b + tl.cast(h, tl.int64) * delta_h + i
        ds = (p * (g - tl.load(delta + at, mask=i < q_rows, other=0.0)[None, :])).to(q0.dtype)
        dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
        if D1:
            dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["group", "first", "tiles", "all_tiles", "q_rows", "k_rows", "lo", "hi"])
def dkdv_kernel(
    q, q_rest, k, k_rest, v, v_rest, dout, dout_rest, lse, delta, dk, dk_rest, dv_out, dv_out_rest, q_docs, k_docs, limits,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, dout_b, dout_h, dout_l, lse_b, lse_h, delta_b, delta_h,
    dk_b, dk_h, dk_l, dv_out_b, dv_out_h, dv_out_l, q_docs_b, k_docs_b,
    heads, group, first, tiles, all_tiles, q_rows, k_rows, lo, hi, scale, scale_log2, d, dv,
    LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (if DK) and dv (if DV) of key tiles [first, first + tiles), summed over the query heads that share the keys."""
    pid = tl.program_id(0)
    tile = first + pid % tiles
    bh = pid // tiles
    b = bh // heads
    kv = bh % heads
    n = tile * BN
    # Seen from keys: query i sees key j iff j - hi <= i <= j - lo.
    begin, a, z, end = tiles_seen(
        n, k_rows, q_rows, -hi, -lo, limits + (b * all_tiles + tile) * 4 if DOCS else 0, BN, BM, HI, LO, DOCS
    )
    if begin == end:
        return
    k0 = read(k, b, kv, n, k_rows, k_b, k_h, k_l, d, 0, BN, D0, True, PADDED, TMA, WIDEN)
    k1 = 0
    if D1:
        k1 = read(k_rest, b, kv, n, k_rows, k_b, k_h, k_l, d, D0, BN, D1, True, PADDED, TMA, WIDEN)
    v0 = 0
    v1 = 0
    if DK:
        v0 = read(v, b, kv, n, k_rows, v_b, v_h, v_l, dv, 0, BN, V0, True, PADDED, TMA, WIDEN)
        if V1:
            v1 = read(v_rest, b, kv, n, k_rows, v_b, v_h, v_l, dv, V0, BN, V1, True, PADDED, TMA, WIDEN)
    doc_k = 0
    if DOCS:
        doc_k = documents(k_docs, b, n, k_rows, k_docs_b, -2, BN)
    dk0 = 0.0
    dk1 = 0.0
    dv0 = 0.0
    dv1 = 0.0
    if DK:
        dk0 = tl.zeros([BN, D0], tl.float32)
        if D1:
            dk1 = tl.zeros([BN, D1], tl.float32)
    if DV:
        dv0 = tl.zeros([BN, V0], tl.float32)
        if V1:
            dv1 = tl.zeros([BN, V1], tl.float32)

    # One loop over (query head, tile): the loads of the next head are under way when a head ends.
    whole = z - a
    for t in range(group * whole):
        h = kv * group + t // whole
        row = (a + t % whole) * BM
        dk0, dk1, dv0, dv1 = _by_key(
            dk0, dk1, dv0, dv1,
            k0, k1, v0, v1, q, q_rest, dout, dout_rest, lse, delta, b, h, row, n, q_rows, k_rows,
            q_b, q_h, q_l, dout_b, dout_h, dout_l, lse_b, lse_h, delta_b, delta_h, d, dv,
            q_docs, q_docs_b, doc_k, lo, hi, scale_log2,
            False, LO, HI, DOCS, DK, DV, BM, BN, D0, D1, V0, V1, PADDED, TMA, WIDEN, PRECISION,
        )  # fmt: skip
    part = end - begin - whole
    for t in range(group * part):
        h = kv * group + t // part
        row = begin + t % part
        row = tl.where(row < a, row, row + whole) * BM
        dk0, dk1, dv0, dv1 = _by_key(
            dk0, dk1, dv0, dv1,
            k0, k1, v0, v1, q, q_rest, dout, dout_rest, lse, delta, b, h, row, n, q_rows, k_rows,
            q_b, q_h, q_l, dout_b, dout_h, dout_l, lse_b, lse_h, delta_b, delta_h, d, dv,
            q_docs, q_docs_b, doc_k, lo, hi, scale_log2,
            True, LO, HI, DOCS, DK, DV, BM, BN, D0, D1, V0, V1, PADDED, TMA, WIDEN, PRECISION,
        )  # fmt: skip

    if DK:
        write(dk, dk0 * scale, b, kv, n, k_rows, dk_b, dk_h, dk_l, d, 0, BN, D0, True, TMA)
        if D1:
            write(dk_rest, dk1 * scale, b, kv, n, k_rows, dk_b, dk_h, dk_l, d, D0, BN, D1, True, TMA)
    if DV:
        write(dv_out, dv0, b, kv, n, k_rows, dv_out_b, dv_out_h, dv_out_l, dv, 0, BN, V0, True, TMA)
        if V1:
            write(dv_out_rest, dv1, b, kv, n, k_rows, dv_out_b, dv_out_h, dv_out_l, dv, V0, BN, V1, True, TMA)


@triton.jit
def _by_query(
    dq0, dq1,
    q0, q1, do0, do1, x, delta_i, k, k_rest, v, v_rest, b, kv, row, n, k_rows,
    k_b, k_h, k_l, v_b, v_h, v_l, d, dv, doc_q, k_docs, k_docs_b, lo, hi, scale_log2,
    MASKED: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile, beginning at key n, added to dq of the queries from `row` on."""
    k0 = read(k, b, kv, n, k_rows, k_b, k_h, k_l, d, 0, BN, D0, MASKED, PADDED, TMA, WIDEN)
    k1 = 0
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D1:
        k1 = read(k_rest, b, kv, n, k_rows, k_b, k_h, k_l, d, D0, BN, D1, MASKED, PADDED, TMA, WIDEN)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
    if MASKED:
        doc_k = 0
        if DOCS:
            doc_k = documents(k_docs, b, n, k_rows, k_docs_b, -2, BN)[None, :]
        i = row + tl.arange(0, BM)
        j = n + tl.arange(0, BN)
        seen = pairs(i[:, None], j[None, :], k_rows, doc_q[:, None] if DOCS else 0, doc_k, lo, hi, LO, HI, DOCS)
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s * scale_log2 - x[:, None])
    v0 = read(v, b, kv, n, k_rows, v_b, v_h, v_l, dv, 0, BN, V0, MASKED, PADDED, TMA, WIDEN)
    g = tl.dot(do0, tl.trans(v0), input_precision=PRECISION)
    if V1:
        v1 = read(v_rest, b, kv, n, k_rows, v_b, v_h, v_l, dv, V0, BN, V1, MASKED, PADDED, TMA, WIDEN)
        g = tl.dot(do1, tl.trans(v1), g, input_precision=PRECISION)
    ds = (p * (g - delta_i[:, None])).to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
    if D1:
        dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return dq0, dq1


@triton.jit(do_not_specialize=["group", "first", "tiles", "all_tiles", "q_rows", "k_rows", "lo", "hi"])
def dq_kernel(
    q, q_rest, k, k_rest, v, v_rest, dout, dout_rest, lse, delta, dq, dq_rest, q_docs, k_docs, limits,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, dout_b, dout_h, dout_l, lse_b, lse_h, delta_b, delta_h,
    dq_b, dq_h, dq_l, q_docs_b, k_docs_b,
    heads, group, first, tiles, all_tiles, q_rows, k_rows, lo, hi, scale, scale_log2, d, dv,
    LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of query tiles [first, first + tiles), of every head and batch row."""
    pid = tl.program_id(0)
    tile = pid % tiles
    if HI:
        tile = tiles - 1 - tile
    tile += first
    bh = pid // tiles
    b = bh // heads
    h = bh % heads
    kv = h // group
    row = tile * BM
    begin, a, z, end = tiles_seen(
        row, q_rows, k_rows, lo, hi, limits + (b * all_tiles + tile) * 4 if DOCS else 0, BM, BN, LO, HI, DOCS
    )
    if begin == end:
        return
    r = row + tl.arange(0, BM)
    inside = r < q_rows
    x = _row_lse(lse, tl.cast(b, tl.int64) * lse_b + tl.cast(h, tl.int64) * lse_h + r, inside)
    delta_i = tl.load(
        delta + tl.cast(b, tl.int64) * delta_b + tl.cast(h, tl.int64) * delta_h + r, mask=inside, other=0.0
    )
    q0 = read(q, b, h, row, q_rows, q_b, q_h, q_l, d, 0, BM, D0, True, PADDED, TMA, WIDEN)
    do0 = read(dout, b, h, row, q_rows, dout_b, dout_h, dout_l, dv, 0, BM, V0, True, PADDED, TMA, WIDEN)
    q1 = 0
    do1 = 0
    dq0 = tl.zeros([BM, D0], tl.float32)
    dq1 = 0.0
    if D1:
        q1 = read(q_rest, b, h, row, q_rows, q_b, q_h, q_l, d, D0, BM, D1, True, PADDED, TMA, WIDEN)
        dq1 = tl.zeros([BM, D1], tl.float32)
    if V1:
        do1 = read(dout_rest, b, h, row, q_rows, dout_b, dout_h, dout_l, dv, V0, BM, V1, True, PADDED, TMA, WIDEN)
    doc_q = 0
    if DOCS:
        doc_q = documents(q_docs, b, row, q_rows, q_docs_b, -1, BM)

    for t in range(a, z):
        dq0, dq1 = _by_query(
            dq0, dq1, q0, q1, do0, do1, x, delta_i, k, k_rest, v, v_rest, b, kv, row, t * BN, k_rows,
            k_b, k_h, k_l, v_b, v_h, v_l, d, dv, doc_q, k_docs, k_docs_b, lo, hi, scale_log2,
            False, LO, HI, DOCS, BM, BN, D0, D1, V0, V1, PADDED, TMA, WIDEN, PRECISION,
        )  # fmt: skip
    for t in range(begin, end - (z - a)):
        n = tl.where(t < a, t, t + (z - a)) * BN
        dq0, dq1 = _by_query(
            dq0, dq1, q0, q1, do0, do1, x, delta_i, k, k_rest, v, v_rest, b, kv, row, n, k_rows,
            k_b, k_h, k_l, v_b, v_h, v_l, d, dv, doc_q, k_docs, k_docs_b, lo, hi, scale_log2,
            True, LO, HI, DOCS, BM, BN, D0, D1, V0, V1, PADDED, TMA, WIDEN, PRECISION,
        )  # fmt: skip

    write(dq, dq0 * scale, b, h, row, q_rows, dq_b, dq_h, dq_l, d, 0, BM, D0, True, TMA)
    if D1:
        write(dq_rest, dq1 * scale, b, h, row, q_rows, dq_b, dq_h, dq_l, d, D0, BM, D1, True, TMA)
