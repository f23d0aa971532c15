"""Fused experts on logical ranks, forward and backward, against one device that takes token after token, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.experts.fused import Mlp, fused_experts
from meshplan.kernels.experts.grouped import Packed
from meshplan.kernels.experts.window import Sizes, Window, logical
from meshplan.ops.experts.grouped import grouped_mlp
from tests.kernels.interpreted import interpreted
from tests.ops.experts.reference import PARAMETERS, ROUTINGS, Case, H, check, indices, reference, tensors

UNEVEN = {2: (5, 9), 4: (3, 0, 6, 1), 8: (1, 0, 3, 2, 0, 4, 1, 2)}


def window_for(case: Case, **more: Any) -> Window:
    sizes = {"tokens": max(*case.tokens, 1), "k": case.k, "row_bytes": 8 * H, "chunk": 4, "weight_bytes": 8} | more
    return logical(Sizes(ranks=len(case.tokens), experts=case.experts, **sizes))


def on_all(case: Case, window: Window, dtype: torch.dtype = torch.float64, mlp: bool = False) -> list[dict[str, Any]]:
    """What each rank gets: its rows of out, tokens and weights, its experts' gradients."""
    t, n = tensors(case), len(case.tokens)
    t = {name: x.to(dtype) for name, x in t.items()}
    rows = [slice(sum(case.tokens[:r]), sum(case.tokens[: r + 1])) for r in range(n)]
    own = {name: [t[name][at].clone().requires_grad_() for at in rows] for name in ("tokens", "weights")}
    params = [
        {name: t[name].chunk(n)[r].clone().requires_grad_() for name in PARAMETERS if name in t} for r in range(n)
    ]

    def body(p: dict[str, Tensor]) -> Any:
        if mlp:
            return Mlp(Packed(p["up"], p["down"], p.get("up_bias"), p.get("down_bias")))
        return lambda x, counts: grouped_mlp(x, counts, **p)

    chosen = [indices(case)[at] for at in rows]
    out = fused_experts(own["tokens"], chosen, own["weights"], [body(p) for p in params], window)
    torch.autograd.backward(out, [t["grad"][at] for at in rows])
    return [
        {"out": out[r].detach(), "tokens": own["tokens"][r].grad, "weights": own["weights"][r].grad}
        | {name: x.grad for name, x in params[r].items()}
        for r in range(n)
    ]


def close(case: Case, ranks: list[dict[str, Tensor]], tolerance: float) -> None:
    """As `reference.check`, for float32."""
    for name, expected in reference(case).items():
        found = torch.cat([r[name] for r in ranks]).double()
        assert float((found - expected).abs().max() if expected.numel() else 0) <= tolerance * max(
            1.0, float(expected.abs().max()) if expected.numel() else 1.0
        ), name


@pytest.mark.parametrize("routing", ROUTINGS)
@interpreted
def test_ranks_are_one_device(routing):
    for n, k in ((2, 2), (4, 3)):
        case = Case(UNEVEN[n], k=k, routing=routing)
        check(case, on_all(case, window_for(case)))


@interpreted
def test_eight_ranks_and_top_8():
    case = Case(UNEVEN[8], experts=16, k=8)
    check(case, on_all(case, window_for(case)))


@pytest.mark.parametrize("k", [1, 4])
@interpreted
def test_experts_begin_on_tiles_as_they_arrive(k):
    """The kernels' own MLP, which reads inboxes through a table: with biases, idle experts, a rank without tokens."""
    case = Case(UNEVEN[4], k=k, routing="holes" if k == 4 else "random")
    close(case, on_all(case, window_for(case), torch.float32, mlp=True), 3e-6)


@interpreted
def test_one_token_no_token_and_other_degrees():
    for tokens, experts, mlp in (((1, 0), 6, True), ((0, 0, 1), 3, False), ((0, 0), 2, True), ((7,), 5, False)):
        case = Case(tokens, experts=experts, k=2)
        if mlp:
            close(case, on_all(case, window_for(case), torch.float32, mlp=True), 3e-6)
        else:
            check(case, on_all(case, window_for(case)))


@interpreted
def test_a_window_serves_call_after_call():
    """The same memory, other routings: nothing of an exchange before is read, and equal calls give equal bits."""
    cases = [Case(UNEVEN[2], k=2, routing=routing) for routing in ("random", "one", "idle", "random")]
    window = window_for(cases[0])
    results = [on_all(case, window) for case in cases]
    for case, ranks in zip(cases, results, strict=True):
        check(case, ranks)
    for first, last in zip(results[0], results[-1], strict=True):
        assert all(torch.equal(first[name], last[name]) for name in first)
    assert (window.told, window.pushed, window.answered) == (4, 8, 8)


@interpreted
def test_two_layers_share_a_window_and_backward_crosses_both():
    case = Case(UNEVEN[2], k=2, bias=False)
    window, t = window_for(case), tensors(case)
    rows = [slice(0, 5), slice(5, 14)]
    chosen = [indices(case)[at] for at in rows]
    scale = [torch.tensor([0.5], dtype=torch.float64, requires_grad=True) for _ in rows]
    x = [t["tokens"][at].clone().requires_grad_() for at in rows]
    weights = [t["weights"][at] for at in rows]
    bodies = [lambda x, _, s=s: s * x for s in scale]
    y = fused_experts(fused_experts(x, chosen, weights, bodies, window), chosen, weights, bodies, window)
    torch.autograd.backward(y, [torch.ones_like(out) for out in y])
    for at, r in zip(rows, x, strict=True):
        factor = 0.5 * t["weights"][at].sum(1, keepdim=True)
        torch.testing.assert_close(r.grad, (factor * factor).expand_as(r), rtol=1e-12, atol=1e-12)


@interpreted
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_drawn_problems_are_one_device(data):
    n = data.draw(st.sampled_from([1, 2, 3, 4]), "ranks")
    experts = n * data.draw(st.integers(1, 3), "experts of a rank")
    tokens = tuple(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n), "tokens"))
    k = data.draw(st.integers(1, min(8, experts)), "choices")
    routings = ROUTINGS if experts > 1 else ["random", "same", "holes"]
    case = Case(tokens, experts, k, data.draw(st.sampled_from(routings), "routing"), data.draw(st.booleans(), "bias"))
    window = window_for(case, chunk=data.draw(st.sampled_from([1, 4, 8]), "chunk"))
    if data.draw(st.booleans(), "mlp"):
        close(case, on_all(case, window, torch.float32, mlp=True), 3e-6)
    else:
        check(case, on_all(case, window))


@interpreted
def test_half_precision_travels_as_it_is_and_is_summed_in_float32():
    def scaled(x: Tensor, _: Any) -> Tensor:
        return x * 2

    x = [torch.full((3, 2), 1.0 + r, dtype=torch.bfloat16, requires_grad=True) for r in range(2)]
    chosen = [torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32)] * 2
    weights = [torch.full((3, 2), 0.5, requires_grad=True) for _ in range(2)]
    window = logical(Sizes(ranks=2, experts=2, tokens=3, k=2, row_bytes=4, chunk=2))
    out = fused_experts(x, chosen, weights, [scaled] * 2, window)
    torch.autograd.backward(out, [torch.ones_like(o) for o in out])
    for r in range(2):
        assert out[r].dtype == torch.bfloat16 and torch.equal(out[r], torch.full_like(out[r], 2.0 + 2 * r))
        assert torch.equal(x[r].grad, torch.full_like(x[r], 2.0))
        assert torch.equal(weights[r].grad, torch.full((3, 2), 4.0 + 4 * r))


@interpreted
def test_what_a_window_does_not_hold_is_refused_before_a_row_is_sent():
    case = Case((5, 9), k=2, routing="same")  # all 14 tokens to rank 1
    window = window_for(case, capacity=14, chunk=2)  # 5 rows take 3 chunks, 9 take 5: 16 rows
    with pytest.raises(PlanError, match="16 rows come to rank 1, whose window holds 14") as caught:
        on_all(case, window)
    assert caught.value.code == "experts-overflow"
    assert not any(region[window.sizes.fields["inbox"][0] :].any() for region in window.regions.values())
    check(case, on_all(case, window_for(case, capacity=16, chunk=2)))
    for less in ({"tokens": 8}, {"k": 1}, {"row_bytes": 8}):
        with pytest.raises(PlanError, match="a rank has more than") as caught:
            on_all(case, window_for(case, **less))
        assert caught.value.code == "experts-overflow"
    # After a refusal the window serves again.
    fits = dataclasses.replace(case, routing="random")
    check(fits, on_all(fits, window))


@interpreted
def test_wrong_indices_and_tensors_are_refused():
    x, w = [torch.zeros(2, 3), torch.zeros(1, 3)], [torch.ones(2, 1), torch.ones(1, 1)]
    window = logical(Sizes(ranks=2, experts=4, tokens=2, k=1, row_bytes=12, chunk=2))
    bodies = [lambda x, _: x] * 2

    def code(x: Any, i: Any, w: Any) -> str:
        with pytest.raises(PlanError) as caught:
            fused_experts(x, i, w, bodies, window)
        return caught.value.code

    good = [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)]
    assert code(x, [good[0], good[1] + 4], w) == "expert-index"
    assert code(x, [good[0][:1], good[1]], w) == "experts-shape"
    assert code([t.double() for t in x], good, w) == "experts-kernel"
    for up, down in (((1, 4, 3), (1, 3, 2)), ((2, 4, 3), (2, 4, 2)), ((2, 4, 5), (2, 3, 2))):
        bodies = [Mlp(Packed(torch.zeros(up), torch.zeros(down)))] * 2
        assert code(x, good, w) == "experts-shape"
