"""Experts in every form, against each token and each choice computed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshplan.models.experts import ExpertList, PackedExperts
from meshplan.ops.experts.grouped import clamped_swiglu, grouped_mlp
from meshplan.ops.experts.routing import combine, expand, pairs_of, sorted_slots

E, H, I = 6, 5, 3  # odd and unequal on purpose
FORMS = {
    "llama": {},
    "gpt-oss": {"gate": "clamped_swiglu", "has_bias": True, "is_concatenated": False, "is_transposed": True},
    "biases": {"has_bias": True},
    "turned": {"is_transposed": True},
}


def packed(form: str) -> PackedExperts:
    torch.manual_seed(1)
    experts = PackedExperts(E, H, I, **FORMS[form]).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=3.0)
    return experts


def problem(tokens: int = 7, k: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, indices with an idle expert (5) and choices without one, weights, and a gradient of the result."""
    draw = torch.Generator().manual_seed(2)
    scores = torch.rand(tokens, E, generator=draw)
    scores[:, 5] = -1
    index = scores.topk(k, 1).indices
    index[2, 1] = -1
    floats = [torch.randn(tokens, n, generator=draw, dtype=torch.float64) for n in (H, k, H)]
    return floats[0], index, floats[1], floats[2]


def by_hand(experts: PackedExperts, x: Tensor, e: int) -> Tensor:
    """One token through one expert, number by number where gate and up are told apart."""
    up, down = experts.gate_up_proj[e], experts.down_proj[e]
    if experts.is_transposed:
        up, down = up.T, down.T
    h = up @ x if experts.gate_up_proj_bias is None else up @ x + experts.gate_up_proj_bias[e]
    hidden = []
    for i in range(I):
        gate, other = (h[i], h[I + i]) if experts.is_concatenated else (h[2 * i], h[2 * i + 1])
        if experts.gate == "swiglu":
            hidden.append(gate * torch.sigmoid(gate) * other)
        else:
            gate, other = torch.clamp(gate, max=7.0), torch.clamp(other, -7.0, 7.0)
            hidden.append((other + 1) * gate * torch.sigmoid(1.702 * gate))
    out = down @ torch.stack(hidden)
    return out if experts.down_proj_bias is None else out + experts.down_proj_bias[e]


@pytest.mark.parametrize("form", FORMS)
def test_results_and_every_gradient_are_those_of_each_choice_alone(form):
    experts, (tokens, index, weights, grad) = packed(form), problem()
    leaves = [tokens.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    out = [tokens.new_zeros(H) for _ in tokens]
    for t, choices in enumerate(index.tolist()):
        for j, e in enumerate(choices):
            if e >= 0:
                out[t] = out[t] + weights[t, j] * by_hand(experts, tokens[t], e)
    expected = torch.stack(out)
    got = experts(tokens, index, weights)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((got * grad).sum(), leaves),
        torch.autograd.grad((expected * grad).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_sorted_rows_through_the_grouped_body_are_the_same(form):
    """What ranks with a part of the experts run: rows sorted by expert, one matmul each."""
    experts, (tokens, index, weights, _) = packed(form), problem()
    slots, counts = sorted_slots(index, E)
    pairs = pairs_of(slots, int(counts.sum()), index.shape[1])
    y = grouped_mlp(
        expand(tokens, pairs),
        counts.tolist(),
        experts.gate_up_proj,
        experts.down_proj,
        experts.gate_up_proj_bias,
        experts.down_proj_bias,
        activation=clamped_swiglu if experts.gate == "clamped_swiglu" else "silu",
        interleaved=not experts.is_concatenated,
        turned=experts.is_transposed,
    )
    torch.testing.assert_close(combine(y, weights, pairs), experts(tokens, index, weights), rtol=1e-12, atol=1e-12)


def listed() -> ExpertList:
    torch.manual_seed(1)
    return ExpertList(E, H, I).double()


@pytest.mark.parametrize("experts", [packed("gpt-oss"), listed()], ids=["packed", "list"])
def test_an_idle_experts_gradient_is_zero_and_not_missing(experts):
    tokens, index, weights, grad = problem()
    experts(tokens, index, weights).backward(grad)
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        idle = parameter.grad[5] if isinstance(experts, PackedExperts) else parameter.grad
        assert idle.any() == (isinstance(experts, ExpertList) and not name.startswith("5.")), name


@pytest.mark.parametrize("experts", [packed("gpt-oss"), listed()], ids=["packed", "list"])
def test_no_token_gives_no_row_and_zero_gradients(experts):
    out = experts(torch.zeros(0, H).double(), torch.zeros(0, 2).long(), torch.zeros(0, 2).double())
    assert out.shape == (0, H)
    experts.zero_grad()
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_a_list_has_modules_of_its_own():
    assert [name for name, _ in listed().named_parameters()][:3] == ["0.w1.weight", "0.w2.weight", "0.w3.weight"]


def test_float32_weights_of_half_precision_tokens_keep_their_dtype():
    experts = packed("llama").bfloat16()
    tokens, index, weights, _ = problem()
    assert experts(tokens.bfloat16(), index, weights.float()).dtype == torch.bfloat16
