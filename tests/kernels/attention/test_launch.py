"""What a pair of blocks launches, and which tiles its programs visit: those that hold a visible pair, and no other."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.kernels.attention import block, launch
from meshplan.kernels.attention.backward import dkdv_kernel, dq_kernel
from meshplan.kernels.attention.block import Span
from meshplan.kernels.attention.forward import forward_kernel
from meshplan.kernels.attention.launch import Docs, limits
from meshplan.kernels.attention.tile import document_limits, tiles_seen
from meshplan.kernels.attention.tiles import Width, splits_backward, tiles_for, width_of
from meshplan.kernels.launch import Machine
from tests.kernels.interpreted import interpreted

HOPPER = Machine(hopper=True, tf32x3=True)


def blocks(lq, lk, d=128, dv=None, heads=(8, 2), batch=2):
    """Shapes only, rows before heads as a projection leaves them."""
    dv = d if dv is None else dv

    def empty(h, length, width, dtype=torch.bfloat16):
        return torch.empty(batch, length, h, width, dtype=dtype, device="meta").transpose(1, 2)

    return empty(heads[0], lq, d), empty(heads[1], lk, d), empty(heads[1], lk, dv), empty(heads[0], lq, dv)


def forward(lq, lk, span, machine=HOPPER, docs=None, **sizes):
    q, k, v, _ = blocks(lq, lk, **sizes)
    return list(launch.forward_launches(q, k, v, span, 0.1, block.new_state(q, v), docs, machine))


def backward(lq, lk, span, machine=HOPPER, docs=None, **sizes):
    q, k, v, dout = blocks(lq, lk, **sizes)
    rows = torch.empty(q.shape[:3], device="meta")
    sums = [torch.empty(x.shape, device="meta") for x in (q, k, v)]
    return list(launch.backward_launches(q, k, v, dout, rows, rows, span, 0.1, *sums, docs, machine))


def test_keys_after_all_queries_launch_nothing():
    assert forward(256, 256, Span(0, 256, right=0)) == []
    assert backward(256, 256, Span(0, 256, right=0)) == []
    assert forward(256, 256, Span(512, 0, left=256, right=0)) == []


@pytest.mark.parametrize("span", [Span(256, 0, right=0), Span(255, 0, right=0), Span(100, 0, left=355, right=200)])
def test_a_block_that_is_seen_whole_is_compiled_without_a_mask(span):
    for one in forward(256, 256, span) + backward(256, 256, span):
        assert not one.arguments["LO"] and not one.arguments["HI"]


def test_a_zigzag_hop_does_the_half_that_is_seen():
    # Rank 1 of 4 holds chunks 1 and 6 of 8, rank 2 chunks 2 and 5; chunks are 512 long.
    tiles = tiles_for("forward", 128, 2, False, True).queries
    whole = 512 // tiles * 2 * 8
    assert forward(512, 512, Span(512, 1024, right=0)) == []
    (one,) = forward(512, 512, Span(6 * 512, 1024, right=0))
    assert one.programs == whole and not one.arguments["HI"]


def test_only_tiles_that_see_something_get_a_program():
    # A window of 100: of 1024 queries behind the keys' end, the first 99 see a key.
    span = Span(1024, 0, left=99, right=0)
    (one,) = forward(1024, 1024, span)
    assert one.programs == -(-99 // one.arguments["BM"]) * 2 * 8
    by_key, by_query = backward(1024, 1024, span)
    assert by_key.programs == -(-99 // by_key.arguments["BN"]) * 2 * 2
    assert by_key.arguments["first"] == (1024 - 99) // by_key.arguments["BN"]
    assert by_query.programs == -(-99 // by_query.arguments["BM"]) * 2 * 8


def test_gradients_of_keys_and_values_take_a_kernel_each_at_head_dim_256():
    kernels = [one.kernel for one in backward(256, 256, Span(0, 0), d=128)]
    assert kernels == [dkdv_kernel, dq_kernel]
    split = backward(256, 256, Span(0, 0), d=256)
    assert [one.kernel for one in split] == [dkdv_kernel, dkdv_kernel, dq_kernel]
    assert [(one.arguments["DK"], one.arguments["DV"]) for one in split[:2]] == [(True, False), (False, True)]


def test_documents_are_looked_through_once_a_kernel():
    ids = torch.zeros(2, 256, dtype=torch.int32, device="meta")
    launches = forward(256, 256, Span(0, 0), docs=Docs(ids, ids))
    assert [one.kernel for one in launches] == [document_limits, forward_kernel]


@pytest.mark.parametrize(
    ("dim", "width"),
    [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (128, (128, 0)), (192, (128, 64)), (256, (256, 0)), (8, (16, 0))],
)
def test_a_head_dim_is_covered_by_at_most_two_powers_of_two(dim, width):
    assert width_of(dim) == Width(*width)


def test_no_head_dim_is_cut_short_and_few_are_padded_much():
    for dim in range(1, 257):
        cover = width_of(dim)
        assert dim <= cover.total <= dim * 4 / 3 + 15
        assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (cover.main, cover.rest))


def test_every_head_dim_has_tiles_on_every_machine():
    for dim in (16, 64, 80, 96, 128, 160, 192, 224, 256):
        for kind in ("forward", "dq", *(("dk", "dv") if splits_backward(2 * dim) else ("dkdv",))):
            for size, documents, tma in itertools.product((2, 4), (False, True), (False, True)):
                tiles = tiles_for(kind, dim, size, documents, tma)
                assert tiles.queries >= 16 and tiles.keys >= 16


def test_tensor_descriptors_need_steps_of_16_bytes():
    q, k, v, _ = blocks(64, 64)
    state = block.new_state(q, v)

    def uses(q):
        (one,) = launch.forward_launches(q, k, v, Span(0, 0), 0.1, state, None, HOPPER)
        return one.arguments["TMA"]

    assert uses(q)
    assert not uses(torch.empty(2, 8, 64, 129, dtype=torch.bfloat16, device="meta")[..., :128])
    assert uses(torch.empty(2, 8, 64, 136, dtype=torch.bfloat16, device="meta")[..., :128])
    (one,) = forward(64, 64, Span(0, 0), machine=Machine())
    assert not one.arguments["TMA"]


@triton.jit
def _seen_kernel(out, limits, row, rows, others, lo, hi, T: tl.constexpr, U: tl.constexpr, LO: tl.constexpr,
                 HI: tl.constexpr, DOCS: tl.constexpr):  # fmt: skip
    begin, a, z, end = tiles_seen(row, rows, others, lo, hi, limits, T, U, LO, HI, DOCS)
    tl.store(out, begin)
    tl.store(out + 1, a)
    tl.store(out + 2, z)
    tl.store(out + 3, end)


def tiles_visited(tile, lq, lk, reach, T, U, found=None):
    out = torch.zeros(4, dtype=torch.int32)
    lo, hi = reach.lo is not None, reach.hi is not None
    line = None if found is None else found[0, tile]
    _seen_kernel[(1,)](out, line, tile * T, lq, lk, reach.lo or 0, reach.hi or 0, T, U, lo, hi, found is not None)
    return out.tolist()


def check_tiles(lq, lk, span, T, U, seen, found=None, exact=True):
    """Of each tile of queries: visited are the tiles with a visible pair, without a mask those of visible pairs only."""
    reach = limits(span, lq, lk)
    start, count = launch._tile_range(*reach.rows(lq, lk), T)
    for tile in range(-(-lq // T)):
        if tile not in range(start, start + count):
            assert not seen[tile * T : (tile + 1) * T].any()
            continue
        begin, a, z, end = tiles_visited(tile, lq, lk, reach, T, U, found)
        assert begin <= a <= z <= end
        some, whole = set(), set()
        for other in range(-(-lk // U)):
            part = seen[tile * T : (tile + 1) * T, other * U : (other + 1) * U]
            some |= {other} if part.any() else set()
            whole |= {other} if part.all() and (other + 1) * U <= lk else set()
        assert some <= set(range(begin, end)) and set(range(a, z)) <= whole
        if exact:
            assert set(range(begin, end)) == some and set(range(a, z)) == whole


@interpreted
@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_tiles_visited_are_those_that_hold_a_visible_pair(data):
    draw = data.draw
    lq, lk = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    bound = st.none() | st.integers(-20, 45)
    span = Span(draw(st.integers(0, 60)), draw(st.integers(0, 60)), draw(bound), draw(bound))
    i, j = torch.arange(lq)[:, None] + span.q_start, torch.arange(lk)[None, :] + span.k_start
    seen = torch.ones(lq, lk, dtype=torch.bool)
    if span.left is not None:
        seen &= j >= i - span.left
    if span.right is not None:
        seen &= j <= i + span.right
    check_tiles(lq, lk, span, draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8])), seen)


@pytest.mark.parametrize(
    ("q_ids", "k_ids", "exact"),
    [
        ([0] * 9 + [1] * 13 + [2] * 18, [0] * 9 + [1] * 13 + [2] * 18, True),
        ([0] * 40, [0] * 33 + [-1] * 7, True),
        ([3] * 20 + [4] * 20, [1] * 20 + [3] * 12, True),
        ([0, 2, 1, 0] * 6, [2, 0, 0, 1] * 5, False),
        ([0] * 8 + [1] * 8 + [0] * 8, [0] * 8 + [1] * 8 + [0] * 8, False),
        ([-1] * 16, [0] * 16, True),
    ],
)
@interpreted
def test_documents_limit_the_tiles_that_are_visited(q_ids, k_ids, exact):
    q, k = torch.tensor([q_ids], dtype=torch.int32), torch.tensor([k_ids], dtype=torch.int32)
    count = -(-len(q_ids) // 8)
    found = torch.empty(1, count, 4, dtype=torch.int32)
    document_limits[(count,)](q, k, found, q.stride(0), k.stride(0), len(q_ids), len(k_ids), count, 8, 16)
    seen = (q[0][:, None] == k[0][None, :]) & (q[0] >= 0)[:, None]
    check_tiles(len(q_ids), len(k_ids), Span(0, 0), 8, 4, seen, found, exact)
    causal = seen & (torch.arange(len(k_ids))[None, :] <= torch.arange(len(q_ids))[:, None])
    check_tiles(len(q_ids), len(k_ids), Span(0, 0, right=0), 8, 4, causal, found, False)
