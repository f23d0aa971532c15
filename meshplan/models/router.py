"""Which experts a token goes to, and with what weights: scores, groups of experts, and the bias that balances them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.ops.experts.balance import add_choices, step_bias
from meshplan.ops.precision import wide

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens are routed.

    Attributes:
        n_experts, top_k: experts, and how many of them a token goes to.
        score: `softmax` over all experts, or each expert's own `sigmoid` (DeepSeek-V3).
        normalise: the weights of a token's experts sum to 1 before scaling.
        scaling: what the weights are multiplied by.
        n_groups, top_groups: experts are cut into `n_groups` equal groups in order, and a token's experts come from the
            `top_groups` with the largest sum of two scores (DeepSeek-V3, section 2.1.2); 1 and 1 for no limit.
        balance_bias: experts are chosen by their score plus a bias that `Router.update_bias` moves against the load
            (DeepSeek-V3, section 2.1.2); weights do not contain it.
        linear_bias: the projection to scores has a bias (gpt-oss).
    """

    n_experts: int
    top_k: int
    score: str = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    balance_bias: bool = False
    linear_bias: bool = False

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise PlanError(f"routers have no score {self.score!r}", code="bad-model", legal=", ".join(SCORES))
        if self.n_groups < 1 or self.n_experts % self.n_groups or not 1 <= self.top_groups <= self.n_groups:
            raise PlanError(
                f"{self.n_experts} experts cannot be limited to {self.top_groups} of {self.n_groups} groups",
                code="bad-model",
                legal="n_groups that divides n_experts, and top_groups from 1 to n_groups",
            )
        reach = self.n_experts // self.n_groups * self.top_groups
        if not 1 <= self.top_k <= reach:
            raise PlanError(
                f"a token cannot go to {self.top_k} of {reach} experts",
                code="bad-model",
                legal=f"top_k from 1 to {reach}",
            )
        if self.n_groups > 1 and self.n_experts < 2 * self.n_groups:
            raise PlanError(
                f"groups of {self.n_experts // self.n_groups} expert have no two scores to be ranked by",
                code="bad-model",
                legal="at least 2 experts a group",
            )


class Routing(NamedTuple):
    """What a router decided for T tokens, and what its losses are computed from.

    Attributes:
        chosen: int64 [T, k], the experts, in no particular order.
        weights: [T, k], what their results are multiplied by; at least float32.
        logits: [T, E], before softmax or sigmoid.
    """

    chosen: Tensor
    weights: Tensor
    logits: Tensor


class Router(nn.Module):
    """A linear projection to one score an expert, and the choice of the top k.

    Scores are computed in at least float32. With `balance_bias`, forward passes in training count choices, each token
    once, also where activations are recomputed; `update_bias` uses the counts up.
    """

    balance_bias: Tensor
    choices: Tensor

    def __init__(self, dim: int, c: RouterConfig) -> None:
        super().__init__()
        self.config = c
        self.gate = nn.Linear(dim, c.n_experts, bias=c.linear_bias)
        if c.balance_bias:
            self.register_buffer("balance_bias", torch.zeros(c.n_experts))
            # Used up by the next `update_bias`: not worth saving.
            self.register_buffer("choices", torch.zeros(c.n_experts, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        """No bias yet, and nothing counted. The projection has an initialiser of its own."""
        if self.config.balance_bias:
            self.balance_bias.zero_()
            self.choices.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Tokens [T, dim] to their experts."""
        c = self.config
        logits = self.gate(x)
        scores = expert_scores(logits, c.score)
        preference = scores.detach()
        if c.balance_bias:
            preference = preference + self.balance_bias
        if c.top_groups < c.n_groups:
            preference = self._within_groups(preference)
        index = preference.topk(c.top_k, dim=-1).indices
        if c.balance_bias and self.training:
            add_choices(self.choices, index)
        weights = scores.gather(-1, index)
        if c.normalise:
            # Sigmoids may all be zero; no sum of softmax scores is changed by so little.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(index, weights * c.scaling, logits)

    def _within_groups(self, preference: Tensor) -> Tensor:
        """[T, E] with -inf for the experts outside of each token's best groups."""
        c = self.config
        grouped = preference.unflatten(-1, (c.n_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(c.top_groups, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)

    def update_bias(self, rate: float = 0.001) -> None:
        """Once an optimizer step: lower the bias of experts with more than the mean of choices since the last call,
        raise that of those with fewer (DeepSeek-V3 trains with a rate of 0.001)."""
        step_bias(self.balance_bias, self.choices, rate)
        self.choices.zero_()


def expert_scores(logits: Tensor, score: str) -> Tensor:
    """Softmax over the last dim or sigmoid, in at least float32."""
    logits = logits.to(wide(logits.dtype))
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()
