"""Routing token by token, as loops and sorting do it; its gradients; its losses; and the bias that balances."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshplan.errors import PlanError
from meshplan.models.router import Router, RouterConfig, Routing
from meshplan.models.router_losses import RouterLosses, router_loss
from meshplan.ops.experts.balance import load_balance_loss, sequence_loss, z_loss

DIM, E = 5, 12
CONFIGS = {
    "mixtral": RouterConfig(n_experts=E, top_k=2),
    "all": RouterConfig(n_experts=E, top_k=E, normalise=False, linear_bias=True),
    "top 1": RouterConfig(n_experts=E, top_k=1, normalise=False),
    "deepseek": RouterConfig(
        n_experts=E, top_k=3, score="sigmoid", scaling=2.5, n_groups=4, top_groups=2, balance_bias=True
    ),
    "groups of softmax": RouterConfig(n_experts=E, top_k=4, n_groups=3, top_groups=2, scaling=0.5),
}


def router(c: RouterConfig) -> Router:
    torch.manual_seed(4)
    made = Router(DIM, c).double()
    if c.balance_bias:
        made.balance_bias.copy_(torch.randn(E) * 0.3)
    return made


def rows(n: int = 9) -> torch.Tensor:
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_hand(r: Router, x: torch.Tensor) -> dict[int, torch.Tensor]:
    """The weight of each expert that one token goes to."""
    c = r.config
    logits = [x @ r.gate.weight[e] + (r.gate.bias[e] if c.linear_bias else 0) for e in range(E)]
    if c.score == "sigmoid":
        scores = [1 / (1 + torch.exp(-z)) for z in logits]
    else:
        total = sum(torch.exp(z) for z in logits)
        scores = [torch.exp(z) / total for z in logits]
    liking = [s.item() + (r.balance_bias[e].item() if c.balance_bias else 0.0) for e, s in enumerate(scores)]
    size = E // c.n_groups
    groups = [sum(sorted(liking[g * size : (g + 1) * size])[-2:]) for g in range(c.n_groups)]
    best = sorted(range(c.n_groups), key=lambda g: -groups[g])[: c.top_groups]
    chosen = sorted((e for e in range(E) if e // size in best), key=lambda e: -liking[e])[: c.top_k]
    norm = sum(scores[e] for e in chosen) if c.normalise else 1.0
    return {e: scores[e] / norm * c.scaling for e in chosen}


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_weights_and_gradients_are_those_of_each_token_alone(name):
    r, x = router(CONFIGS[name]), rows()
    grad = torch.randn(len(x), E, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    routing = r(mine)
    assert routing.chosen.dtype == torch.int64 and routing.logits.shape == (9, E)
    whole = torch.zeros(9, E, dtype=torch.float64).scatter(1, routing.chosen, routing.weights)
    expected = torch.stack(
        [torch.stack([w.get(e, x.new_zeros(())) for e in range(E)]) for w in (by_hand(r, row) for row in theirs)]
    )
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
    parameters = list(r.parameters())
    got = torch.autograd.grad((whole * grad).sum(), [mine, *parameters])
    want = torch.autograd.grad((expected * grad).sum(), [theirs, *parameters])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_half_precision_scores_are_computed_in_float32():
    r, x = router(CONFIGS["mixtral"]).bfloat16(), rows().bfloat16()
    routing = r(x)
    assert routing.weights.dtype == torch.float32
    logits = (x @ r.gate.weight.T).float()
    torch.testing.assert_close(
        routing.weights, logits.softmax(-1).topk(2).values / logits.softmax(-1).topk(2).values.sum(-1, True)
    )


def test_choices_are_counted_once_also_where_activations_are_recomputed():
    r, x = router(CONFIGS["deepseek"]).train(), rows().requires_grad_()
    checkpoint(lambda x: r(x).weights, x, use_reentrant=False).sum().backward()
    counts = torch.bincount(r(x.detach()).chosen.flatten(), minlength=E)
    assert torch.equal(r.choices, 2 * counts)  # the pass that was checked, and this one


def test_the_bias_balances_a_skewed_router():
    r, x = router(CONFIGS["deepseek"]).train(), rows(40) + 1.0

    def imbalance() -> float:
        counts = torch.bincount(r(x).chosen.flatten(), minlength=E)
        return counts.max().item() * E / counts.sum().item()

    r.balance_bias.zero_()
    before = imbalance()
    r.choices.zero_()
    for _ in range(200):
        r(x)
        r.update_bias(0.005)
    assert before > 2.5 and imbalance() < 1.6


def test_reset_clears_bias_and_counts_and_saves_only_the_bias():
    r = router(CONFIGS["deepseek"]).train()
    r(rows())
    assert set(r.state_dict()) == {"gate.weight", "balance_bias"}
    r.reset_parameters()
    assert not r.balance_bias.any() and not r.choices.any()


LOGITS = torch.randn(2, 10, E, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def routings(logits: torch.Tensor) -> list[Routing]:
    index = logits.detach().topk(3, -1).indices
    return [Routing(i, torch.zeros_like(i, dtype=torch.float64), z) for i, z in zip(index, logits, strict=True)]


def test_losses_over_layers_are_their_definitions():
    logits = LOGITS.clone().requires_grad_()
    flat, chosen = logits.flatten(0, 1), LOGITS.topk(3, -1).indices.flatten(0, 1)
    probabilities = torch.exp(flat) / torch.exp(flat).sum(-1, keepdim=True)
    balance = sum(E * (chosen == e).sum().item() / 20 * probabilities[:, e].mean() for e in range(E))
    z = torch.log(torch.exp(flat).sum(-1)).square().mean()
    sequences = sum(
        E / (3 * 5) * (chosen[first : first + 5] == e).sum().item() * probabilities[first : first + 5, e].mean() / 2
        for first in (0, 5, 10, 15)
        for e in range(E)
    )
    expected = 0.2 * balance + 0.3 * z + 0.4 * sequences
    losses = RouterLosses(load_balance=0.2, z=0.3, sequence=0.4)
    got = router_loss(routings(logits), losses, "softmax", batch=2)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    a, b = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (got, expected))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_losses_of_sigmoid_scores_take_their_shares():
    scores = LOGITS.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    chosen = LOGITS.topk(3, -1).indices.flatten(0, 1)
    expected = sum(E * (chosen == e).sum().item() / 20 * shares.flatten(0, 1)[:, e].mean() for e in range(E))
    got = router_loss(routings(LOGITS), RouterLosses(load_balance=1.0), "sigmoid", batch=2)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"score": "relu"},
        {"n_groups": 5},
        {"n_groups": 0},
        {"n_groups": 3, "top_groups": 4},
        {"n_groups": 3, "top_groups": 1, "top_k": 5},
        {"top_k": 13},
        {"top_k": 0},
        {"n_groups": 12, "top_groups": 4},
    ],
    ids=str,
)
def test_what_no_router_can_be_is_refused(options):
    with pytest.raises(PlanError) as error:
        RouterConfig(**{"n_experts": E, "top_k": 2, **options})
    assert error.value.code == "bad-model"


def test_losses_are_those_of_one_rank_that_has_all_tokens():
    flat, chosen = LOGITS.flatten(0, 1), LOGITS.topk(3, -1).indices.flatten(0, 1)
    p = flat.softmax(-1)
    sequences = sum(
        sequence_loss(LOGITS[layer].softmax(-1).view(2, 5, E), chosen.view(2, 2, 5, 3)[layer], batch_groups=())
        for layer in range(2)
    )
    for losses, want in [
        (RouterLosses(load_balance=1.0), load_balance_loss(p, chosen, groups=())),
        (RouterLosses(z=1.0), z_loss(flat, groups=())),
        (RouterLosses(sequence=1.0), sequences),
    ]:
        torch.testing.assert_close(router_loss(routings(LOGITS), losses, "softmax", batch=2), want, rtol=1e-12, atol=0)
