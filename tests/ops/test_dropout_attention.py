"""Attention with dropout: torch's attention with an explicit mask, which no split of batch and heads changes."""

import math

import pytest
import torch
import torch.nn.functional as F

from meshplan.errors import PlanError
from meshplan.mesh.streams import keep_mask
from meshplan.ops.dropout_attention import scaled_dot_product_attention

B, H, L, K, E = 3, 4, 5, 6, 2
WHOLE = {"stream": 17, "global_shape": (B, H, L, K), "offsets": (0, 0, 0, 0)}


def qkv(heads=H, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, E), (B, heads, K, E), (B, heads, K, 3))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def by_hand(q, k, v, mask=None, scale=None, p=0.25):
    scores = torch.einsum("bhld,bhsd->bhls", q, k) * (1 / math.sqrt(E) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    keep = keep_mask(17, (B, H, L, K), (0, 0, 0, 0), (B, H, L, K), p)
    return torch.einsum("bhls,bhsd->bhld", scores.softmax(-1) * keep / (1 - p), v)


@pytest.mark.parametrize("case", ["plain", "causal", "bool", "float", "scale"])
def test_value_and_gradients_are_those_of_the_masked_formula(case):
    mask = torch.rand(L, K, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[:, 0] = True
    options, reference = {
        "plain": ({}, {}),
        "causal": ({"is_causal": True}, {"mask": torch.ones(L, K, dtype=torch.bool).tril()}),
        "bool": ({"attn_mask": mask}, {"mask": mask}),
        "float": ({"attn_mask": torch.zeros(L, K).masked_fill(~mask, float("-inf"))}, {"mask": mask}),
        "scale": ({"scale": 0.3}, {"scale": 0.3}),
    }[case]
    ours, theirs = qkv(), qkv()
    out, expected = (
        scaled_dot_product_attention(*ours, dropout_p=0.25, **options, **WHOLE),
        by_hand(*theirs, **reference),
    )
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-15)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out.backward(upstream)
    expected.backward(upstream)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)


def test_a_split_of_batch_and_heads_gives_the_slices():
    q, k, v = (x.detach() for x in qkv())
    expected = scaled_dot_product_attention(q, k, v, dropout_p=0.5, **WHOLE)
    for b0, b1 in ((0, 2), (2, 3)):
        for h0, h1 in ((0, 3), (3, 4)):
            mine = [x[b0:b1, h0:h1] for x in (q, k, v)]
            where = {**WHOLE, "offsets": (b0, h0, 0, 0)}
            out = scaled_dot_product_attention(*mine, dropout_p=0.5, **where)
            torch.testing.assert_close(out, expected[b0:b1, h0:h1], rtol=1e-14, atol=1e-16)


def test_grouped_heads_are_repeated_as_torch_repeats_them():
    q, k, v = (x.detach() for x in qkv(heads=2))
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.25, enable_gqa=True, **WHOLE)
    spread = [x[:, [0, 0, 1, 1]] for x in (k, v)]
    torch.testing.assert_close(out, by_hand(q, *spread), rtol=1e-13, atol=1e-15)


def test_a_fully_masked_row_is_zero_with_zero_gradient_as_in_torch():
    mask = torch.ones(L, K, dtype=torch.bool)
    mask[2] = False
    q, k, v = qkv()
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.25, **WHOLE)
    out.sum().backward()
    assert not out[:, :, 2].any()
    assert not q.grad[:, :, 2].any()
    assert k.grad.isfinite().all()
    assert not F.scaled_dot_product_attention(*qkv(), attn_mask=mask)[:, :, 2].any()


def test_without_dropout_it_is_torchs_operator():
    q, k, v = qkv()
    out = scaled_dot_product_attention(q, k, v, is_causal=True, **WHOLE)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_half_precision_is_computed_in_float32():
    q, k, v = (x.detach().bfloat16() for x in qkv())
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.25, **WHOLE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_hand(*(x.double() for x in (q, k, v))), rtol=2.0**-8, atol=1e-5)


def test_what_torch_refuses_is_refused():
    q, k, v = qkv()
    with pytest.raises(PlanError) as refusal:
        scaled_dot_product_attention(q, k, v, torch.ones(L, K, dtype=torch.bool), 0.1, is_causal=True, **WHOLE)
    assert refusal.value.code == "attention-mask"
    with pytest.raises(PlanError) as refusal:
        scaled_dot_product_attention(q, k[:, :3], v[:, :3], dropout_p=0.1, enable_gqa=True, **WHOLE)
    assert refusal.value.code == "attention-heads"
