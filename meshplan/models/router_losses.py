"""The losses that a model adds for its routers: load balance, z, and DeepSeek's balance within each sequence.

Each is written on the whole batch, in operators that say by themselves what they are means of. `ops/experts/balance.py` has
the same losses for code that sees one rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.models.router import Routing, expert_scores
from meshplan.ops.precision import wide


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """What each loss is multiplied by; 0 leaves it out.

    Attributes:
        load_balance: of the tokens of all layers taken together, as transformers' Mixtral does.
        z: of the tokens of all layers taken together.
        sequence: the sum over layers of each one's own.
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
    logits, chosen = torch.cat([r.logits for r in routings]), torch.cat([r.chosen for r in routings])
    total = torch.zeros((), device=logits.device)
    if losses.load_balance:
        total = total + losses.load_balance * balance(_probabilities(logits, score), chosen).sum()
    if losses.z:
        total = total + losses.z * z_loss(logits)
    if losses.sequence:
        for r in routings:
            probabilities = _probabilities(r.logits, score).unflatten(0, (batch, -1))
            within = balance(probabilities, r.chosen.unflatten(0, (batch, -1)))
            total = total + losses.sequence / r.chosen.shape[-1] * within.sum(-1).mean()
    return total


def balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """E f_e P_e of each expert, along dim -2: its share of choices f_e = count_e / T, a constant, and its mean probability
    P_e. Their sum is the load-balance loss (Fedus, Zoph, Shazeer 2021, "Switch Transformers", equation 4); divided by k and
    taken of one sequence, the sequence-wise one (DeepSeek-V3, equations 17 to 20).

    Arguments:
        probabilities: [..., T, E]; chosen: int64 [..., T, k].

    Returns:
        [..., E].
    """
    experts = probabilities.shape[-1]
    picked = chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)
    share = picked.sum(-2).to(probabilities.dtype).mean(-2)
    return experts * share * probabilities.mean(-2)


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE", equation 5).

    Arguments:
        logits: [T, E].
    """
    return torch.logsumexp(logits.to(wide(logits.dtype)), -1).square().mean()


def _probabilities(logits: Tensor, score: str) -> Tensor:
    """[T, E], each token's scores divided by their sum."""
    scores = expert_scores(logits, score)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
