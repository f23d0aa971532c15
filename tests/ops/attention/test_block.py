"""One block of attention: any cut into blocks and tiles gives the whole, what is not seen costs nothing, and rows stay finite."""

import itertools

import pytest
import torch

from meshplan import compat
from meshplan.ops.attention import block, tile
from meshplan.ops.attention.block import Span

B, H, HKV, L, D, DV = 2, 4, 2, 30, 5, 3
SPANS = [(None, None), (None, 0), (6, 0), (3, 4), (None, -1), (-2, None)]


def tensors(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = ((B, H, L, D), (B, HKV, L, D), (B, HKV, L, DV), (B, H, L, DV))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def by_hand(q, k, v, dout, left, right, sink=None):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    at, to = torch.arange(L).unsqueeze(1), torch.arange(L)
    seen = torch.ones(L, L, dtype=torch.bool)
    if left is not None:
        seen &= to >= at - left
    if right is not None:
        seen &= to <= at + right
    weights = torch.where(seen, (q @ keys.transpose(-1, -2) * 0.4).exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp().view(-1, 1, 1))
    out = weights / torch.where(total == 0, 1.0, total) @ values
    out.backward(dout.double())
    return out.detach(), total.log().squeeze(-1).detach(), q.grad, k.grad, v.grad


def in_blocks(q, k, v, dout, left, right, q_cuts, k_cuts, sink=None):
    state = block.new_state(q, v)
    cuts = [(a, b, c, d) for a, b in itertools.pairwise(q_cuts) for c, d in itertools.pairwise(k_cuts)]
    for a, b, c, d in cuts:
        span = Span(100 + a, 100 + c, left, right)
        block.forward(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], span, 0.4, state.rows(a, b))
    out, lse = block.finish(state, q.dtype, sink)
    delta = block.delta(out, dout)
    grads = [torch.zeros(x.shape, dtype=state.acc.dtype) for x in (q, k, v)]
    for a, b, c, d in cuts:
        rows = [x[:, :, a:b] for x in (dout, lse, delta)]
        into = (grads[0][:, :, a:b], grads[1][:, :, c:d], grads[2][:, :, c:d])
        span = Span(100 + a, 100 + c, left, right)
        block.backward(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], *rows, span, 0.4, *into)
    return out, lse, *grads


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("rows", [7, 1024])
def test_any_cut_into_blocks_and_tiles_gives_the_whole(span, rows, monkeypatch):
    monkeypatch.setattr(tile, "_ROWS", rows)
    x = tensors()
    for cuts in (([0, L], [0, L]), ([0, 11, L], [0, 4, 4, 23, L])):
        for sink in (None, torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)):
            for found, want in zip(in_blocks(*x, *span, *cuts, sink), by_hand(*x, *span, sink), strict=True):
                torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)


def test_spans_know_what_they_let_see():
    for left, right in SPANS:
        for q_start, k_start, lq, lk in ((0, 0, 4, 4), (8, 0, 4, 6), (0, 8, 4, 6), (3, 1, 5, 9), (50, 1, 3, 3)):
            span = Span(q_start, k_start, left, right)
            at, to = torch.arange(q_start, q_start + lq).unsqueeze(1), torch.arange(k_start, k_start + lk)
            seen = (to <= at + (99 if right is None else right)) & (to >= at - (99 if left is None else left))
            some = seen.any(0).nonzero().flatten().tolist()
            assert span.keys(lq, lk) == ((some[0], some[-1] + 1) if some else (0, 0))
            assert span.sees_all(lq, lk) == bool(seen.all())


class _Counter(compat.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_cannot_be_seen_costs_nothing_and_what_is_all_seen_makes_no_mask():
    q, k, v, _ = tensors()
    state = block.new_state(q, v)
    with _Counter() as counter:
        block.forward(q, k, v, Span(0, L, None, 0), 0.4, state)
    assert counter.names == []
    with _Counter() as counter:
        block.forward(q, k, v, Span(L, 0, None, 0), 0.4, state)
    assert any("bmm" in name for name in counter.names)
    assert not any("arange" in name or "masked_fill_" in name for name in counter.names)


def test_keys_are_never_repeated():
    q, k, v, dout = (torch.randn(1, heads, 64, 16) for heads in (8, 1, 1, 8))
    largest = 0

    class Sizes(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            if "bmm" in str(func):
                largest = max(largest, min(args[0].numel(), args[1].numel()))
            return func(*args, **(kwargs or {}))

    state = block.new_state(q, v)
    with Sizes():
        block.forward(q, k, v, Span(0, 0), 0.4, state)
    assert 0 < largest == k.numel()
    assert dout.shape == block.finish(state, q.dtype)[0].shape


@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_see_nothing_are_zero_and_give_no_gradient(bias):
    q, k, v, dout = tensors()
    mask = torch.zeros(L, L, dtype=torch.bool)
    mask[3:] = True
    told = (
        {"bias": mask}
        if bias
        else {"q_docs": (torch.arange(L) < 3).int().neg().expand(B, -1), "k_docs": torch.zeros(B, L)}
    )
    state = block.new_state(q, v)
    block.forward(q, k, v, Span(0, 0), 0.4, state, **told)
    out, lse = block.finish(state, q.dtype)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    block.backward(q, k, v, dout, lse, block.delta(out, dout), Span(0, 0), 0.4, *grads, **told)
    assert not out[:, :, :3].any() and (lse[:, :, :3] == -float("inf")).all() and not grads[0][:, :, :3].any()
    assert all(x.isfinite().all() for x in (out, *grads)) and lse[:, :, 3:].isfinite().all()


def test_large_scores_do_not_overflow():
    q, k, v, dout = tensors(torch.float32)
    out, lse, *grads = in_blocks(q * 300, k, v, dout, None, 0, [0, L], [0, 9, L])
    assert all(x.isfinite().all() for x in (out, lse, *grads))


def test_half_precision_is_carried_in_float32_and_rounded_once():
    q, k, v, dout = tensors(torch.bfloat16)
    out, lse, *grads = in_blocks(q, k, v, dout, None, 0, [0, L], [0, 4, 9, 14, 20, L])
    want = by_hand(q, k, v, dout, None, 0)
    assert out.dtype == torch.bfloat16 and {x.dtype for x in (lse, *grads)} == {torch.float32}
    torch.testing.assert_close(out.double(), want[0], rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=1e-5)


def test_it_runs_on_fake_tensors():
    with compat.fake_tensor_mode():
        found = in_blocks(*tensors(), 6, 0, [0, 11, L], [0, 4, L])
    assert [tuple(x.shape) for x in found] == [(B, H, L, DV), (B, H, L), (B, H, L, D), (B, HKV, L, D), (B, HKV, L, DV)]
