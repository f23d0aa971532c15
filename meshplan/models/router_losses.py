"""The losses that a model adds for its routers: load balance, z, and DeepSeek's balance within each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.models.router import Routing, expert_scores
from meshplan.ops.experts.balance import load_balance_loss, sequence_loss, z_loss


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """What each loss is multiplied by; 0 leaves it out. `ops/experts/balance.py` has the formulas and their sources.

    Attributes:
        load_balance: of the tokens of all layers taken together, as transformers' Mixtral does.
        z: of the tokens of all layers taken together.
        sequence: the sum over layers of each one's own (DeepSeek-V3, equations 17 to 20).
    """

    load_balance: float = 0.0
    z: float = 0.0
    sequence: float = 0.0


def router_loss(routings: Sequence[Routing], losses: RouterLosses, score: str, batch: int) -> Tensor:
    """The weighted sum of a model's router losses.

    Arguments:
        routings: of every router, over the same T tokens.
        score: of the routers, as in `RouterConfig`.
        batch: sequences that the T tokens are, one behind the other.

    Returns:
        0-dim, in at least float32.
    """
    total = routings[0].weights.new_zeros(())
    if losses.load_balance or losses.z:
        logits, index = torch.cat([r.logits for r in routings]), torch.cat([r.chosen for r in routings])
        if losses.load_balance:
            balance = load_balance_loss(_probabilities(logits, score), index, groups=())
            total = total + losses.load_balance * balance
        if losses.z:
            total = total + losses.z * z_loss(logits, groups=())
    if losses.sequence:
        for r in routings:
            probabilities = _probabilities(r.logits, score).unflatten(0, (batch, -1))
            index = r.chosen.unflatten(0, (batch, -1))
            total = total + losses.sequence * sequence_loss(probabilities, index, batch_groups=())
    return total


def _probabilities(logits: Tensor, score: str) -> Tensor:
    """[T, E], each token's scores divided by their sum."""
    scores = expert_scores(logits, score)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
