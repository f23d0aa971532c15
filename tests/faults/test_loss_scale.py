"""Losses over data ranks that hold unequal numbers of valid tokens: every token of the global batch weighs alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, ids, numbers, plan_of

pytestmark = pytest.mark.usefixtures("pool")


class Weighted(nn.Module):
    """One weight w = 1: the loss of a token is w x, summed over valid tokens and divided by their number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w, self.how = nn.Parameter(torch.ones(())), how

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        losses = self.w * x
        if self.how == "where":
            return torch.where(valid, losses, 0.0).sum() / valid.sum()
        if self.how == "product":
            return (losses * valid).sum() / valid.sum().clamp(min=1)
        return (losses * valid).sum(1).mean()


class Losses(nn.Module):
    """Regression losses of a split batch, and means of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(4, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.down(torch.tanh(self.up(x)))
        F = nn.functional
        match self.kind:
            case "mse_loss" | "smooth_l1_loss" | "l1_loss" | "huber_loss":
                return getattr(F, self.kind)(z, y)
            case "mse_sum":
                return F.mse_loss(z, y, reduction="sum")
            case "bce":
                return F.binary_cross_entropy_with_logits(z, y.sigmoid())
            case "kl":
                return F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean")
            case "nll":
                return F.nll_loss(z.log_softmax(-1), y.argmax(-1))
            case "cosine":
                return 1 - F.cosine_similarity(z, y, dim=-1).mean()
            case "std":
                return (z - y).std()
            case "norm":
                return (z - y).norm()
            case "max":
                return (z - y).abs().max()
        raise AssertionError(self.kind)


class TwoHeads(nn.Module):
    """A loss and an extra prediction head whose valid tokens are others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(4, 7)

    def forward(self, tokens: Tensor, labels: Tensor, extra: Tensor) -> Tensor:
        x = torch.tanh(self.embed(tokens))
        ce = nn.functional.cross_entropy
        return ce(self.first(x).transpose(1, 2), labels) + 0.3 * ce(self.second(x).transpose(1, 2), extra)


DP = {"dp_shard": 2}


def tokens() -> dict[str, Tensor]:
    """Rank 0 has one valid token with loss 4, rank 1 has three with loss 1."""
    x = torch.tensor([[4.0, 9.0, 9.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    return {"x": x, "valid": torch.tensor([[True, False, False], [True, True, True]])}


def of(**shapes: Any) -> mp.Plan:
    return plan_of({n: numbers(*s, dp=mp.S(0)) for n, s in shapes.items()}, mesh=DP)


def outside_the_model() -> list[float]:
    """On a rank: what `token_mean` gives, its gradient after reduction, for losses computed outside the model."""
    inputs = {"x": numbers(2, 3, dp=mp.S(0)), "valid": mp.Input(shape=(2, 3), dtype=torch.bool, place={"dp": mp.S(0)})}
    model = mp.parallelize(PerToken(), mp.Plan(mesh=DP, inputs=inputs))
    local = mp.shard_batch(model, tokens())
    loss = mp.token_mean(model(**local), local["valid"])
    loss.backward()
    return [loss.item(), model.w.grad.item()]


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        return self.w * x


def test_a_token_mean_of_unequal_counts_outside_the_model(pool):
    # torchtitan#2206: (4 + 1 + 1 + 1) / 4 = 1.75, where the mean of rank means is 2.5. Each rank propagates its sum x 2 / 4.
    assert pool.run(outside_the_model, world=2) == [[2.0, 1.75], [1.5, 1.75]]


@pytest.mark.parametrize("how", ["where", "product", "rows"])
def test_a_masked_mean_written_in_the_model(how):
    inputs = {"x": numbers(2, 3, dp=mp.S(0)), "valid": mp.Input(shape=(2, 3), dtype=torch.bool, place={"dp": mp.S(0)})}
    exact(partial(Weighted, how), mp.Plan(mesh=DP, inputs=inputs), inputs=tokens())


@pytest.mark.parametrize(
    "kind",
    [
        "mse_loss",
        "smooth_l1_loss",
        "l1_loss",
        "huber_loss",
        "mse_sum",
        "bce",
        "kl",
        "nll",
        "cosine",
        "std",
        "norm",
        "max",
    ],
)
def test_losses_over_a_split_batch(kind):
    exact(partial(Losses, kind), of(x=(6, 4), y=(6, 3)))


@pytest.mark.parametrize("kind", ["mse_loss", "smooth_l1_loss", "std", "norm", "kl"])
def test_losses_over_split_features_of_unequal_sizes(kind):
    inputs = {"x": numbers(5, 4), "y": numbers(5, 3)}
    exact(partial(Losses, kind), plan_of(inputs, mp.Rule("down", use="colwise")))


def test_an_extra_head_counts_its_own_tokens():
    # Megatron-LM#7452 (3).
    inputs = {name: ids(2, 4, dp=mp.S(0)) for name in ("tokens", "labels", "extra")}
    batch = {
        "tokens": torch.arange(8).view(2, 4) % 7,
        "labels": torch.tensor([[1, 2, 3, 4], [5, -100, -100, 6]]),
        "extra": torch.tensor([[1, -100, -100, -100], [2, 3, 4, -100]]),
    }
    exact(TwoHeads, mp.Plan(mesh=DP, inputs=inputs), inputs=batch)


def test_a_data_rank_without_any_valid_token():
    inputs = {name: ids(2, 4, dp=mp.S(0)) for name in ("tokens", "labels", "extra")}
    none = torch.tensor([[1, 2, 3, 4], [-100] * 4])
    exact(
        TwoHeads,
        mp.Plan(mesh=DP, inputs=inputs),
        inputs={"tokens": torch.arange(8).view(2, 4) % 7, "labels": none, "extra": none},
    )
