"""Experts, all on one device: what tokens are given after their router chose, with packed weights or as a list of modules.

Both forms are called as `experts(tokens [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]`, the contract of
transformers' experts, and packed ones name their parameters and options as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.models.llama import INIT_STD, FeedForward
from meshplan.ops.experts.grouped import clamped_swiglu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up (GLU variants improve transformer, Shazeer 2020)."""
    return F.silu(gate) * up


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


def weighted_sum(
    tokens: Tensor, index: Tensor, weights: Tensor, n_experts: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """out[t] = sum over j of weights[t, j] expert(index[t, j], tokens[t]), one expert after the other.

    An expert without tokens is called too, on no rows: its gradients are zeros and not missing.

    Arguments:
        tokens: [T, H]; index: integers [T, k], negative for a choice that no expert takes; weights: [T, k].
        expert: of a number and rows [N, H], those rows' results [N, H].
    """
    out = torch.zeros_like(tokens)
    for e in range(n_experts):
        token, choice = torch.where(index == e)
        weighted = expert(e, tokens[token]) * weights[token, choice].unsqueeze(-1)
        out = out.index_add(0, token, weighted.to(out.dtype))
    return out


class PackedExperts(nn.Module):
    """Gated MLPs whose weights are packed into one tensor a projection: `down(gate(x) * up(x))` of each expert.

    Shapes, for E experts of width I on tokens of width H (with `is_transposed` the last two dims are exchanged):

        gate_up_proj [E, 2 I, H], gate_up_proj_bias [E, 2 I]    down_proj [E, H, I], down_proj_bias [E, H]

    Arguments:
        n_experts, dim, expert_dim: E, H and I.
        gate: the gated unit, a name of `GATES`.
        has_bias: both projections have biases.
        is_concatenated: gate and up follow each other, g g u u; else they alternate, g u g u (gpt-oss).
        is_transposed: weights are [in, out] (gpt-oss) rather than [out, in].
    """

    def __init__(
        self,
        n_experts: int,
        dim: int,
        expert_dim: int,
        *,
        gate: str = "swiglu",
        has_bias: bool = False,
        is_concatenated: bool = True,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.gate = n_experts, gate
        self.has_gate, self.has_bias = True, has_bias
        self.is_concatenated, self.is_transposed = is_concatenated, is_transposed
        up, down = (2 * expert_dim, dim), (dim, expert_dim)
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, *(up[::-1] if is_transposed else up)))
        self.down_proj = nn.Parameter(torch.empty(n_experts, *(down[::-1] if is_transposed else down)))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(n_experts, 2 * expert_dim)) if has_bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(n_experts, dim)) if has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, and no biases yet."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=INIT_STD)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `weighted_sum`."""
        return weighted_sum(tokens, top_k_index, top_k_weights, self.num_experts, self.expert)

    def expert(self, e: int, x: Tensor) -> Tensor:
        """Expert `e` on rows [N, H]."""
        gate_up = self._linear(
            x, self.gate_up_proj[e], None if self.gate_up_proj_bias is None else self.gate_up_proj_bias[e]
        )
        hidden = self._apply_gate(gate_up)
        return self._linear(hidden, self.down_proj[e], None if self.down_proj_bias is None else self.down_proj_bias[e])

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.T if self.is_transposed else weight, bias)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        if self.is_concatenated:
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return GATES[self.gate](gate, up)


class ExpertList(nn.ModuleList):
    """Experts that are modules of their own, SwiGLU feed-forwards named `0`, `1`, ..."""

    def __init__(self, n_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__(FeedForward(dim, expert_dim) for _ in range(n_experts))

    def forward(self, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `weighted_sum`."""
        return weighted_sum(tokens, top_k_index, top_k_weights, len(self), self.expert)

    def expert(self, e: int, x: Tensor) -> Tensor:
        """Expert `e` on rows [N, H]."""
        return self[e](x)
