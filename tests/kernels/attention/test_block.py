"""The Triton blocks against softmax in float64: masks, head dims, grouped heads, odd lengths, carried states."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.errors import PlanError
from meshplan.kernels.attention import block, launch
from meshplan.kernels.attention.block import Span
from meshplan.kernels.attention.tiles import Tiles
from meshplan.kernels.launch import Machine
from tests.kernels.attention.reference import Outcome, Problem, expected, problem
from tests.kernels.interpreted import interpreted

# Of the largest value: float32 sums, however many blocks they go through.
EXACT = 3e-6
CAUSAL = Span(0, 0, right=0)

SPANS = {
    "full": Span(0, 0),
    "causal": CAUSAL,
    "causal, keys before": Span(30, 9, right=0),
    "causal, keys partly after": Span(5, 21, right=0),
    "window": Span(0, 0, left=6, right=0),
    "window over a border": Span(40, 17, left=20, right=0),
    "band": Span(3, 0, left=4, right=9),
    "keys after only": Span(0, 0, left=-1),
    "far along": Span(3_000_000_000, 2_999_999_990, left=11, right=0),
}


def run(p: Problem, span: Span, sink: torch.Tensor | None = None) -> Outcome:
    """All keys at once."""
    return run_hops(p, [(slice(None), slice(None), span)], sink)


def run_hops(p: Problem, hops: list[tuple[slice, slice, Span]], sink: torch.Tensor | None = None) -> Outcome:
    """One (queries, keys, span) after the other, forward and then backward, into the same sums."""

    def parts(rows: slice, keys: slice):
        docs = (p.q_docs[:, rows], p.k_docs[:, keys]) if p.q_docs is not None else (None, None)
        return p.q[:, :, rows], p.k[:, :, keys], p.v[:, :, keys], docs

    state = block.new_state(p.q, p.v)
    for rows, keys, span in hops:
        q, k, v, docs = parts(rows, keys)
        block.forward(q, k, v, span, p.scale, block.State(*(x[:, :, rows] for x in state)), *docs)
    out, lse = block.finish(state, torch.float32, sink)
    delta = block.delta(out, p.dout.float())
    dq, dk, dv = (torch.zeros(x.shape) for x in (p.q, p.k, p.v))
    for rows, keys, span in hops:
        q, k, v, docs = parts(rows, keys)
        grads = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
        row_facts = lse[:, :, rows], delta[:, :, rows]
        block.backward(q, k, v, p.dout[:, :, rows], *row_facts, span, p.scale, *grads, *docs)
    return Outcome(out, lse, dq, dk, dv)


@pytest.mark.parametrize("name", SPANS)
@interpreted
def test_every_span_is_softmax_in_float64(name):
    p = problem(35, 41, 16, heads=(2, 1))
    run(p, SPANS[name]).check(expected(p, SPANS[name]), EXACT)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (6, 1)])
@interpreted
def test_query_heads_share_keys_without_a_copy(heads):
    p = problem(19, 23, 16, heads=heads, batch=2)
    run(p, CAUSAL).check(expected(p, CAUSAL), EXACT)


@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (72, 40), (24, 112)]
)
@interpreted
def test_head_dims_of_keys_and_values(dims):
    p = problem(18, 33, *dims)
    span = Span(12, 0, right=0)
    run(p, span).check(expected(p, span), EXACT)


DOCUMENTS = {
    "packed": ([0] * 7 + [1] * 20 + [2] * 8, [0] * 7 + [1] * 20 + [2] * 8),
    "one of many": ([5] * 35, [4] * 9 + [5] * 26),
    "a tail of nobody": ([0] * 20 + [-1] * 15, [0] * 20 + [-1] * 15),
    "keys of a later chunk": ([3] * 12 + [4] * 23, [4] * 16 + [6] * 19),
    "in no order": ([i * 7 % 5 for i in range(35)], [i * 3 % 5 - 1 for i in range(35)]),
    "apart": ([0] * 35, [1] * 35),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@interpreted
def test_documents_do_not_see_each_other(name):
    p = problem(35, 35, 16, docs=DOCUMENTS[name], heads=(2, 2))
    for span in (CAUSAL, Span(0, 0)) if name == "packed" else (CAUSAL,):
        run(p, span).check(expected(p, span), EXACT)


@interpreted
def test_documents_differ_from_row_to_row_of_a_batch():
    p = problem(20, 20, 16, batch=2)
    ids = torch.tensor([[0] * 5 + [1] * 15, [0] * 17 + [1] * 3], dtype=torch.int64)
    p = Problem(p.q, p.k, p.v, p.dout, p.scale, ids, ids)
    run(p, CAUSAL).check(expected(p, CAUSAL), EXACT)


@interpreted
def test_a_row_that_sees_nothing_is_zero_and_its_lse_minus_infinity():
    p = problem(35, 20, 16)
    span = Span(0, 18, right=0)  # the first 18 queries stand before all keys
    got = run(p, span)
    assert torch.all(got.out[:, :, :18] == 0) and torch.all(got.lse[:, :, :18] == -float("inf"))
    assert torch.all(got.dq[:, :, :18] == 0) and torch.all(got.dk[:, :, 17:] == 0)
    got.check(expected(p, span), EXACT)


@interpreted
def test_what_sees_nothing_at_all_leaves_state_and_gradients_alone():
    p = problem(20, 20, 16)
    got = run(p, Span(0, 20, right=0))
    assert torch.all(got.out == 0) and torch.all(got.lse == -float("inf"))
    assert not any(x.count_nonzero() for x in (got.dq, got.dk, got.dv))


def hops_of_a_ring(chunks: int, size: int, left: int | None) -> list[tuple[slice, slice, Span]]:
    """All pairs of chunks of a causal sequence, the last keys first: most rows see nothing at first."""
    cuts = [slice(c * size, (c + 1) * size) for c in range(chunks)]
    return [
        (mine, theirs, Span(mine.start, theirs.start, left=left, right=0)) for theirs in reversed(cuts) for mine in cuts
    ]


@pytest.mark.parametrize("left", [None, 11])
@interpreted
def test_a_state_resumed_over_hops_is_the_attention_over_all_keys(left):
    p = problem(36, 36, 24, 16, heads=(2, 1))
    whole = Span(0, 0, left=left, right=0)
    got = run_hops(p, hops_of_a_ring(4, 9, left))
    got.check(expected(p, whole), EXACT)
    got.check(run(p, whole), EXACT)


@interpreted
def test_a_hop_of_documents_resumes_a_state_too():
    ids = [0] * 11 + [1] * 18 + [2] * 7
    p = problem(36, 36, 16, docs=(ids, ids))
    run_hops(p, hops_of_a_ring(3, 12, None)).check(expected(p, CAUSAL), EXACT)


@interpreted
def test_many_hops_in_bfloat16_do_not_add_roundings():
    # Rounded to bfloat16 between hops, 12 of them would be 5e-3 apart.
    p = problem(12, 48, 16, dtype=torch.bfloat16)
    hops = [(slice(None), slice(j, j + 4), Span(48, j, right=0)) for j in range(0, 48, 4)]
    run_hops(p, hops).check(expected(p, Span(48, 0, right=0)), EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@interpreted
def test_half_precision_inputs(dtype):
    p = problem(19, 35, 32, dtype=dtype)
    run(p, CAUSAL).check(expected(p, CAUSAL), EXACT)
    state = block.new_state(p.q, p.v)
    block.forward(p.q, p.k, p.v, CAUSAL, p.scale, state)
    out, lse = block.finish(state, dtype)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert {x.dtype for x in state} == {torch.float32}


@interpreted
def test_a_sink_joins_the_denominator_only():
    p = problem(20, 20, 16, heads=(3, 1))
    sink = torch.tensor([0.7, -float("inf"), 30.0])
    span = Span(0, 4, right=0)
    got = run(p, span, sink)
    got.check(expected(p, span, sink), EXACT)
    assert got.lse[0, :, 0].tolist() == pytest.approx([0.7, -float("inf"), 30.0])  # saw nothing but the sink


@interpreted
def test_scores_of_any_size_neither_overflow_nor_vanish():
    p = problem(20, 36, 16)
    p = Problem(p.q, p.k, p.v, p.dout, 40.0)
    # Scores of several hundred are known to 3e-5 in float32, and so are ratios of their exponentials.
    run(p, CAUSAL).check(expected(p, CAUSAL), 3e-4)


@interpreted
def test_gradients_are_added_to_what_is_there():
    p = problem(17, 17, 16)
    got = run(p, CAUSAL)
    delta = block.delta(got.out, p.dout)
    twice = [x.clone() for x in (got.dq, got.dk, got.dv)]
    block.backward(p.q, p.k, p.v, p.dout, got.lse, delta, CAUSAL, p.scale, *twice)
    for x, once in zip(twice, (got.dq, got.dk, got.dv), strict=True):
        torch.testing.assert_close(x, 2 * once, rtol=0, atol=0)


@pytest.mark.parametrize("dims", [(64, 64), (96, 80)])
@interpreted
def test_tensor_descriptors_and_pointers_read_the_same(dims, monkeypatch):
    p = problem(19, 35, *dims, docs=([0] * 9 + [1] * 10, [0] * 16 + [1] * 19))
    by_pointer = run(p, CAUSAL)
    monkeypatch.setattr(block, "machine", lambda device: Machine(hopper=True, interpreted=True))
    seen = []
    monkeypatch.setattr(launch.Launch, "run", recording(launch.Launch.run, seen))
    by_descriptor = run(p, CAUSAL)
    assert {x.arguments["TMA"] for x in seen if "TMA" in x.arguments} == {True}
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(by_pointer, name), getattr(by_descriptor, name))


@pytest.mark.parametrize("sizes", [(32, 16), (16, 32)])
@interpreted
def test_tiles_need_not_be_square(sizes, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", Tiles(*sizes, 1, 1))
    ids = [0] * 20 + [1] * 50
    p = problem(70, 70, 16, docs=(ids, ids))
    run(p, Span(0, 0, left=30, right=0)).check(expected(p, Span(0, 0, left=30, right=0)), EXACT)
    run_hops(p, hops_of_a_ring(2, 35, None)).check(expected(p, CAUSAL), EXACT)


def recording(method, into):
    def record(self):
        into.append(self)
        return method(self)

    return record


@interpreted
@settings(max_examples=12, deadline=None, database=None)
@given(data=st.data())
def test_any_shape_and_span(data):
    draw = data.draw
    lq, lk = draw(st.integers(1, 34)), draw(st.integers(1, 34))
    kv = draw(st.integers(1, 2))
    bound = st.none() | st.integers(-20, 40)
    span = Span(draw(st.integers(0, 50)), draw(st.integers(0, 50)), draw(bound), draw(bound))
    docs = None
    if draw(st.booleans()):
        docs = tuple(draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n)) for n in (lq, lk))
    d, dv = draw(st.sampled_from([8, 16, 24])), draw(st.sampled_from([16, 20]))
    p = problem(lq, lk, d, dv, (kv * draw(st.integers(1, 2)), kv), docs=docs, seed=draw(st.integers(0, 99)))
    run(p, span).check(expected(p, span), EXACT)


def refused(code: str, p: Problem, state=None, docs=()) -> str:
    with pytest.raises(PlanError) as caught:
        block.forward(p.q, p.k, p.v, CAUSAL, 1.0, state or block.new_state(p.q, p.v), *docs)
    assert caught.value.code == code
    return str(caught.value)


@interpreted
def test_what_the_kernels_do_not_take_is_refused():
    assert "float64" in refused("attention-kernel", problem(5, 5, 16, dtype=torch.float64))
    assert "3 query heads and 2 key" in refused("attention-heads", problem(5, 5, 16, heads=(3, 2)))
    p = problem(5, 5, 16)
    assert "one side" in refused("attention-kernel", p, docs=(torch.zeros(1, 5, dtype=torch.int32),))
    with pytest.raises(PlanError, match="scale above 0"):
        block.forward(p.q, p.k, p.v, CAUSAL, 0.0, block.new_state(p.q, p.v))
    state = block.new_state(p.q, p.v)
    assert "unit stride" in refused("attention-kernel", p, block.State(state.acc.mT.contiguous().mT, state.m, state.l))
    assert "apart" in refused("attention-kernel", p, block.State(state.acc, state.m, torch.zeros(1, 2, 9)[..., :5]))


def test_cpu_tensors_are_refused_where_triton_does_not_interpret():
    code = (
        "import torch; from meshplan.kernels.attention import block\n"
        "x = torch.zeros(1, 1, 4, 16)\n"
        "try: block.finish(block.new_state(x, x), torch.float32)\n"
        "except block.PlanError as error: print(error.code, error.message)"
    )
    quiet = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=quiet, check=True)
    assert ran.stdout.strip() == "attention-kernel the attention kernels got CPU tensors"
