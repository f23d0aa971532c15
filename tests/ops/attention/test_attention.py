"""The drop-in itself: torch's own result on one rank, what it refuses, autocast, other blocks."""

import types

import pytest
import torch
import torch.nn.functional as F

from meshplan.errors import PlanError
from meshplan.ops.attention import block
from meshplan.ops.attention.attention import context_attention, fastest_block
from meshplan.ops.attention.sequence import Sequence
from meshplan.ops.dropout_attention import scaled_dot_product_attention
from meshplan.runtime.comm import AxisGroup
from tests.ops.attention.reference import Case, check, simulated

ALONE = {"group": AxisGroup("cp", 1, 0), "sequence": Sequence(12, 1, "zigzag")}
FOUR = {"group": AxisGroup("cp", 4, 1), "sequence": Sequence(12, 4)}


def qkv(rows=12, heads=4, kv_heads=4, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, heads, rows, 5), (2, kv_heads, rows, 5), (2, kv_heads, rows, 5))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("case", ["plain", "causal", "bool", "float", "keys", "scale", "gqa"])
def test_one_rank_gives_what_torch_gives(method, case):
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) > 0.3
    told = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": torch.randn(2, 1, 12, 12, dtype=torch.float64, requires_grad=True)},
        "keys": {"attn_mask": torch.randn(12, 1, dtype=torch.float64)},
        "scale": {"scale": 0.3},
        "gqa": {"enable_gqa": True},
    }[case]
    ours, theirs = (qkv(kv_heads=2 if case == "gqa" else 4) for _ in range(2))
    out, want = (
        context_attention(*ours, **told, **ALONE, method=method),
        F.scaled_dot_product_attention(*theirs, **told),
    )
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bias = [told["attn_mask"]] if case == "float" else []
    for mine, other in zip(
        torch.autograd.grad(out, ours + bias, up), torch.autograd.grad(want, theirs + bias, up), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


def test_dropout_is_that_of_the_operator_for_one_device():
    q, k, v = qkv()
    whole = {"stream": 5, "global_shape": (6, 9, 12, 12)}
    out = context_attention(q, k, v, None, 0.3, **ALONE, **whole, offsets=(((1, 1), (4, 1)), 2))
    want = scaled_dot_product_attention(q, k, v, None, 0.3, **whole, offsets=(((1, 1), (4, 1)), 2, 0, 0))
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)


def test_dropout_of_exchanged_heads_may_begin_in_runs():
    case = Case("dropout")
    where = {"global_shape": (2, 4, 24, 24), "offsets": (0, ((0, 1), (1, 3)))}
    for method in ("ring", "ulysses"):
        check(case, simulated(case, 4, "zigzag", method=method, **where), "zigzag")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_is_torchs(dtype):
    q, k, v = qkv(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out, want = context_attention(q, k, v, **ALONE), F.scaled_dot_product_attention(q, k, v)
        assert out.dtype == want.dtype
        out.sum().backward()
    exact = F.scaled_dot_product_attention(*(x.detach().to(out.dtype).double() for x in (q, k, v)))
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-8, atol=1e-6)
    assert q.grad.dtype == dtype


def test_another_block_computes_unless_it_cannot():
    calls = []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        block.forward(*args, **kwargs)

    other = types.SimpleNamespace(
        **{n: getattr(block, n) for n in ("new_state", "finish", "delta", "backward")}, forward=forward
    )
    case = Case("documents")
    check(case, simulated(case, 4, "zigzag", method="ring", block=other), "zigzag")
    runs = [run for rank in range(4) for run in Sequence(case.size, 4, "zigzag").runs(rank)]
    assert len(calls) == sum(k_start < q_stop for _, q_stop in runs for k_start, _ in runs)
    assert all(set(kwargs) == {"q_docs", "k_docs"} for kwargs in calls)
    calls.clear()
    q, k, v = qkv()
    holes = torch.arange(12)[:, None] != torch.arange(1, 13)  # of any shape, unlike a mask of position and document
    context_attention(q, k, v, holes, **ALONE, block=other)
    context_attention(q, k, v, None, 0.1, **ALONE, stream=1, block=other)
    assert calls == []


@pytest.mark.parametrize(
    ("code", "told", "tensors"),
    [
        ("context-shape", FOUR, qkv()),
        ("context-shape", ALONE, [x[0] for x in qkv()]),
        ("context-shape", ALONE, [qkv()[0], *qkv(9)[1:]]),
        ("context-shape", ALONE, [qkv()[0].float(), *qkv()[1:]]),
        ("context-shape", {**ALONE, "sink": torch.zeros(3)}, qkv()),
        ("attention-heads", ALONE, qkv(kv_heads=2)),
        ("attention-heads", {**ALONE, "enable_gqa": True}, qkv(kv_heads=3)),
        ("attention-mask", {**ALONE, "attn_mask": torch.ones(12, 12, dtype=torch.bool), "is_causal": True}, qkv()),
        ("context-mask", {**FOUR, "attn_mask": torch.ones(12, 12, dtype=torch.bool)}, qkv(3)),
        ("context-mask", {**ALONE, "attn_mask": torch.ones(12, 12, dtype=torch.int64)}, qkv()),
        ("context-mask", {**ALONE, "docs": torch.zeros(3, 12, dtype=torch.int64)}, qkv()),
        ("context-mask", {**ALONE, "docs": torch.zeros(12)}, qkv()),
        ("bad-dropout", {**ALONE, "dropout_p": 1.5}, qkv()),
        ("bad-dropout", {**ALONE, "dropout_p": 0.5}, qkv()),
        ("bad-value", {**ALONE, "method": "stripe"}, qkv()),
        ("bad-value", {**ALONE, "method": "hybrid"}, qkv()),
        ("context-heads", {**FOUR, "method": "ulysses", "enable_gqa": True}, qkv(3, 6, 3)),
    ],
)
def test_what_it_refuses(code, told, tensors):
    with pytest.raises(PlanError) as refusal:
        context_attention(*tensors, **told)
    assert refusal.value.code == code


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_second_derivatives_are_refused(method):
    q, k, v = qkv()
    out = context_attention(q, k, v, **ALONE, method=method)
    with pytest.raises(PlanError) as refusal:
        torch.autograd.grad(out.sum(), q, create_graph=True)
    assert refusal.value.code == "second-derivative"


@pytest.mark.parametrize(
    ("device", "dtype", "width", "scale", "kernels"),
    [
        ("cuda", torch.bfloat16, 128, 0.1, True),
        ("cuda", torch.float64, 128, 0.1, False),
        ("cuda", torch.float32, 320, 0.1, False),
        ("cuda", torch.float32, 64, -0.1, False),
        ("cpu", torch.float32, 64, 0.1, False),
    ],
)
def test_kernels_compute_what_they_take(device, dtype, width, scale, kernels):
    assert fastest_block(device, dtype, width, scale).__name__.startswith("meshplan.kernels") == kernels
