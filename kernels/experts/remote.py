"""The kernels by which ranks exchange rows through each other's memory; `exchange.py` says what each is for and launches them.

A *run* is a block of rows between two ranks, dealt in chunks; `deal.py` makes the tables. Whoever writes raises a flag where it
will be read, so that nobody polls over the link.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshplan.kernels.experts.gather import sum_rows
from meshplan.kernels.experts.numbers import narrow
from meshplan.kernels.flags import await_all, await_flag, set_flag


@triton.jit
def _run(runs, c, n, NP: tl.constexpr):
    """Of n runs of chunks the one that chunk c is in: its rank, base, first and number of rows, and where c begins in it."""
    i = tl.arange(0, NP)
    starts = tl.load(runs + i, mask=i < n, other=2147483647)
    at = tl.sum((starts <= c).to(tl.int32), 0) - 1
    start = tl.load(runs + at)
    return (
        tl.load(runs + n + at),
        tl.load(runs + 2 * n + at),
        tl.load(runs + 3 * n + at),
        tl.load(runs + 4 * n + at),
        c - start,
    )


@triton.jit
def _of(addresses, rank, like):
    """A part of a rank's region as a pointer such as `like` is. The hint is for after the cast, which forgets it: without it
    accesses are as wide as an element, not 16 bytes."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _flag_of(addresses, rank):
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["row", "words", "rank", "epoch"])
def tell_kernel(message, told, heard, row, words, rank, epoch, B: tl.constexpr):
    """One program for each rank."""
    i = tl.arange(0, B)
    there = _flag_of(told, tl.program_id(0)) + row
    tl.store(there + i, tl.load(message + i, mask=i < words), mask=i < words)
    set_flag(_flag_of(heard, tl.program_id(0)) + rank, epoch)


@triton.jit(do_not_specialize=["n", "epoch"])
def wait_kernel(flags, n, epoch, B: tl.constexpr):
    i = tl.arange(0, B)
    await_all(flags + i, epoch, i < n)


@triton.jit(do_not_specialize=["rank", "epoch"])
def signal_kernel(flags, rank, epoch):
    """One program for each rank, which raises this rank's flag there."""
    set_flag(_flag_of(flags, tl.program_id(0)) + rank, epoch)


@triton.jit(do_not_specialize=["tokens"])
def owners_kernel(indices, keys, tokens, local, n, K: tl.constexpr, R: tl.constexpr, NP: tl.constexpr):
    t = tl.program_id(0) * R + tl.arange(0, R)
    rank = tl.arange(0, NP)
    hit = tl.zeros([R, NP], tl.int32)
    for j in tl.static_range(K):
        e = tl.load(indices + t * K + j, mask=t < tokens, other=-1)
        owner = tl.where(e >= 0, e // local, -1)
        hit |= (owner[:, None] == rank[None, :]).to(tl.int32)
    inside = (t < tokens)[:, None] & (rank < n)[None, :]
    tl.store(keys + t[:, None] * n + rank[None, :], tl.where(hit > 0, rank[None, :], -1), mask=inside)


@triton.jit(do_not_specialize=["epoch"])
def choose_kernel(
    indices, weights, rows, runs, choices, factors, arrived_at, freed, n, local, epoch,
    NP: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One chunk."""
    rank, base, first, count, at = _run(runs, tl.program_id(0), n, NP)
    await_flag(freed + rank, epoch - 1)
    r = at * CHUNK + tl.arange(0, CHUNK)
    j = tl.arange(0, KP)[None, :]
    inside = (r < count)[:, None] & (j < K)
    source = tl.load(rows + first + r, mask=r < count, other=0)[:, None] * K + j
    chosen = tl.load(indices + source, mask=inside, other=-1)
    chosen = tl.where((chosen >= 0) & (chosen // local == rank), chosen - rank * local, -1).to(tl.int32)
    target = (base + r)[:, None] * K + j
    tl.store(_flag_of(choices, rank) + target, chosen, mask=inside)
    tl.store(_of(factors, rank, weights) + target, tl.load(weights + source, mask=inside), mask=inside)
    set_flag(_flag_of(arrived_at, rank) + base // CHUNK + at, epoch)


@triton.jit(do_not_specialize=["chunks", "epoch"])
def push_kernel(
    x, rows, runs, inbox, arrived_at, freed, n, chunks, width, x_row, pitch, epoch,
    NP: tl.constexpr, CHUNK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Chunk after chunk, those of the first run first."""
    for c in range(tl.program_id(0), chunks, tl.num_programs(0)):
        rank, base, first, count, at = _run(runs, c, n, NP)
        await_flag(freed + rank, epoch - 1)
        r = at * CHUNK + tl.arange(0, CHUNK)
        source = x + tl.load(rows + first + r, mask=r < count, other=0)[:, None] * x_row
        target = _of(inbox, rank, x) + (base + r).to(tl.int64)[:, None] * pitch
        for start in range(0, width, W):
            i = start + tl.arange(0, W)[None, :]
            inside = (r < count)[:, None] & (i < width)
            tl.store(target + i, tl.load(source + i, mask=inside), mask=inside)
        set_flag(_flag_of(arrived_at, rank) + base // CHUNK + at, epoch)


@triton.jit(do_not_specialize=["epoch"])
def accept_kernel(
    choices, weights, flags, runs, own_choices, own_weights, n, epoch,
    NP: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One chunk."""
    _, base, _, count, at = _run(runs, tl.program_id(0), n, NP)
    await_flag(flags + base // CHUNK + at, epoch)
    r = at * CHUNK + tl.arange(0, CHUNK)
    j = tl.arange(0, KP)[None, :]
    inside = (r < count)[:, None] & (j < K)
    here = (base + r)[:, None] * K + j
    tl.store(own_choices + here, tl.load(choices + here, mask=inside, other=-1), mask=j < K)
    tl.store(own_weights + here, tl.load(weights + here, mask=inside, other=0.0), mask=j < K)


@triton.jit(do_not_specialize=["n", "epoch"])
def answer_kernel(
    y, weights, place, back, outbox, out_weights, done_at, runs, n_ranks, n, width, y_row, pitch, epoch,
    NP: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """One chunk: its rows into the outbox, and the flag of their source there."""
    rank, base, done, count, at = _run(runs, tl.program_id(0), n_ranks, NP)
    r = at * CHUNK + tl.arange(0, CHUNK)
    m = base + r
    sum_rows(y, weights, place, outbox, m, r < count, n, width, y_row, pitch, K, CHUNK, W, ACC, WIDEN)
    if back is not None:
        j = tl.arange(0, KP)[None, :]
        inside = (r < count)[:, None] & (j < K)
        here = m[:, None] * K + j
        tl.store(out_weights + here, tl.load(back + here, mask=inside), mask=inside)
    set_flag(_flag_of(done_at, rank) + done + at, epoch)


@triton.jit(do_not_specialize=["tokens", "sent", "epoch"])
def pull_kernel(
    out, place, homes, outbox, flags, tokens, sent, width, pitch, most, epoch,
    N: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """R tokens. `homes` int32 [2, N]: where this rank's block begins in each outbox, and where its rows do in the sorted list."""
    t = tl.program_id(0) * R + tl.arange(0, R)
    for j in tl.static_range(N):
        p = tl.load(place + t * N + j, mask=t < tokens, other=sent)
        await_all(flags + j * most + (p - tl.load(homes + N + j)) // CHUNK, epoch, p < sent)
    for start in range(0, width, W):
        c = start + tl.arange(0, W)[None, :]
        sums = tl.zeros([R, W], ACC)
        for j in tl.static_range(N):
            p = tl.load(place + t * N + j, mask=t < tokens, other=sent)
            row = p - tl.load(homes + N + j) + tl.load(homes + j)
            here = _of(outbox, j, out) + row.to(tl.int64)[:, None] * pitch + c
            sums += tl.load(here, mask=(p < sent)[:, None] & (c < width), other=0.0).to(ACC)
        tl.store(
            out + t.to(tl.int64)[:, None] * width + c,
            narrow(sums, out.dtype.element_ty, WIDEN),
            mask=(t < tokens)[:, None] & (c < width),
        )


@triton.jit(do_not_specialize=["size"])
def pull_weights_kernel(out, indices, place, homes, answers, size, local, n, K: tl.constexpr, B: tl.constexpr):
    """B weights."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.load(indices + i, mask=i < size, other=-1)
    there = e >= 0
    rank = tl.where(there, e // local, 0).to(tl.int32)
    p = tl.load(place + i // K * n + rank, mask=there, other=0)
    row = p - tl.load(homes + n + rank) + tl.load(homes + rank)
    region = tl.load(answers + rank).to(tl.pointer_type(out.dtype.element_ty))
    tl.store(out + i, tl.load(region + row * K + i % K, mask=there, other=0.0), mask=i < size)
