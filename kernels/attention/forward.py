"""Flash attention forward over one key block, resuming what earlier key blocks left, and the division at the end.

A program owns one tile of queries of one head. It reads (acc, m, l) in float32, walks the key tiles its rows see, and
writes the three back: what travels between hops is never rounded to the inputs' dtype. Head dims that are no power of
two are cut in two that are (80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64): no multiplication is spent on padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshplan.kernels.attention.tile import LN2, LOG2E, documents, pairs, read, tiles_seen, write


@triton.jit
def _fold(
    acc0, acc1, m, l,
    q0, q1, k, k_rest, v, v_rest, b, kv, row, n, k_rows,
    k_b, k_h, k_l, v_b, v_h, v_l, d, dv,
    doc_q, k_docs, k_docs_b, lo, hi, scale_log2,
    MASKED: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile, beginning at key n, folded into the running sums."""
    k0 = read(k, b, kv, n, k_rows, k_b, k_h, k_l, d, 0, BN, D0, MASKED, PADDED, TMA, WIDEN)
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
    top = tl.maximum(m, tl.max(s, 1) * scale_log2)
    # A row that has seen nothing yet has no maximum: 0 in its place leaves exp2(-inf) = 0, and never -inf - -inf.
    base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = tl.exp2(s * scale_log2 - base[:, None])
    fade = tl.exp2(m - base)
    l = l * fade + tl.sum(p, 1)
    v0 = read(v, b, kv, n, k_rows, v_b, v_h, v_l, dv, 0, BN, V0, MASKED, PADDED, TMA, WIDEN)
    p = p.to(v0.dtype)
    acc0 = tl.dot(p, v0, acc0 * fade[:, None], input_precision=PRECISION)
    if V1:
        v1 = read(v_rest, b, kv, n, k_rows, v_b, v_h, v_l, dv, V0, BN, V1, MASKED, PADDED, TMA, WIDEN)
        acc1 = tl.dot(p, v1, acc1 * fade[:, None], input_precision=PRECISION)
    return acc0, acc1, top, l


@triton.jit(do_not_specialize=["group", "first", "tiles", "all_tiles", "q_rows", "k_rows", "lo", "hi"])
def forward_kernel(
    q, q_rest, k, k_rest, v, v_rest, acc, acc_rest, m, l, q_docs, k_docs, limits,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, acc_b, acc_h, acc_l, m_b, m_h, q_docs_b, k_docs_b,
    heads, group, first, tiles, all_tiles, q_rows, k_rows, lo, hi, scale_log2, d, dv,
    LO: tl.constexpr, HI: tl.constexpr, DOCS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles [first, first + tiles) of queries, of every head and batch row, over one key block."""
    pid = tl.program_id(0)
    tile = pid % tiles
    if HI:
        tile = tiles - 1 - tile  # the tiles that see the most keys start first
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
    at = tl.cast(b, tl.int64) * m_b + tl.cast(h, tl.int64) * m_h + r
    m_i = tl.load(m + at, mask=inside, other=float("-inf")) * LOG2E
    l_i = tl.load(l + at, mask=inside, other=0.0)
    acc0 = read(acc, b, h, row, q_rows, acc_b, acc_h, acc_l, dv, 0, BM, V0, True, PADDED, TMA, False)
    acc1 = 0.0
    if V1:
        acc1 = read(acc_rest, b, h, row, q_rows, acc_b, acc_h, acc_l, dv, V0, BM, V1, True, PADDED, TMA, False)
    q0 = read(q, b, h, row, q_rows, q_b, q_h, q_l, d, 0, BM, D0, True, PADDED, TMA, WIDEN)
    q1 = 0
    if D1:
        q1 = read(q_rest, b, h, row, q_rows, q_b, q_h, q_l, d, D0, BM, D1, True, PADDED, TMA, WIDEN)
    doc_q = 0
    if DOCS:
        doc_q = documents(q_docs, b, row, q_rows, q_docs_b, -1, BM)

    for t in range(a, z):
        acc0, acc1, m_i, l_i = _fold(
            acc0, acc1, m_i, l_i, q0, q1, k, k_rest, v, v_rest, b, kv, row, t * BN, k_rows,
            k_b, k_h, k_l, v_b, v_h, v_l, d, dv, doc_q, k_docs, k_docs_b, lo, hi, scale_log2,
            False, LO, HI, DOCS, BM, BN, D0, D1, V0, V1, PADDED, TMA, WIDEN, PRECISION,
        )  # fmt: skip
    for t in range(begin, end - (z - a)):
        n = tl.where(t < a, t, t + (z - a)) * BN
        acc0, acc1, m_i, l_i = _fold(
            acc0, acc1, m_i, l_i, q0, q1, k, k_rest, v, v_rest, b, kv, row, n, k_rows,
            k_b, k_h, k_l, v_b, v_h, v_l, d, dv, doc_q, k_docs, k_docs_b, lo, hi, scale_log2,
            True, LO, HI, DOCS, BM, BN, D0, D1, V0, V1, PADDED, TMA, WIDEN, PRECISION,
        )  # fmt: skip

    tl.store(m + at, m_i * LN2, mask=inside)
    tl.store(l + at, l_i, mask=inside)
    write(acc, acc0, b, h, row, q_rows, acc_b, acc_h, acc_l, dv, 0, BM, V0, False, TMA)
    if V1:
        write(acc_rest, acc1, b, h, row, q_rows, acc_b, acc_h, acc_l, dv, V0, BM, V1, False, TMA)


@triton.jit(do_not_specialize=["tiles", "rows"])
def finish_kernel(
    acc, m, l, sink, out, lse,
    acc_b, acc_h, acc_l, m_b, m_h, out_b, out_h, out_l, lse_b, lse_h, heads, tiles, rows, dv,
    SINK: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out = acc / l and lse = m + log(l), where the sink's logit joins l; rows that saw nothing: 0 and -inf."""
    pid = tl.program_id(0)
    row = (pid % tiles) * R
    b = pid // tiles // heads
    h = pid // tiles % heads
    r = row + tl.arange(0, R)
    inside = r < rows
    at = tl.cast(b, tl.int64) * m_b + tl.cast(h, tl.int64) * m_h + r
    top = tl.load(m + at, mask=inside, other=float("-inf"))
    total = tl.load(l + at, mask=inside, other=0.0)
    fade = tl.full([R], 1.0, tl.float32)
    if SINK:
        logit = tl.load(sink + h).to(tl.float32)
        old = top
        top = tl.maximum(old, logit)
        base = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2((old - base) * LOG2E)
        total = total * fade + tl.exp2((logit - base) * LOG2E)
    empty = total == 0.0
    tl.store(
        lse + tl.cast(b, tl.int64) * lse_b + tl.cast(h, tl.int64) * lse_h + r,
        tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)) * LN2),
        mask=inside,
    )
    x = read(acc, b, h, row, rows, acc_b, acc_h, acc_l, dv, 0, R, W, True, True, False, False)
    x = x * (fade / tl.where(empty, 1.0, total))[:, None]
    write(out, x.to(out.dtype.element_ty), b, h, row, rows, out_b, out_h, out_l, dv, 0, R, W, False, False)
