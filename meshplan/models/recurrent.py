"""A gated linear recurrence, RG-LRU, and the block around it (De et al. 2024, "Griffin", sections 2.3 and 2.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.models.causal_conv import CausalConv
from meshplan.ops.precision import wide

SHARPNESS = 8.0
"""c of Griffin's equation 3."""


def linear_scan(decay: Tensor, x: Tensor) -> Tensor:
    """h_t = decay_t h_(t-1) + x_t along dim 1, h_0 = 0, in ceil(log2(seq)) steps (Hillis and Steele 1986).

    After a step of distance d, entry t holds what the last 2 d tokens up to t make of it: steps (decay, x) compose, a
    later one (a2, x2) after an earlier (a1, x1) as (a2 a1, a2 x1 + x2).

    Arguments:
        decay, x: [batch, seq, width].
    """
    distance = 1
    while distance < x.shape[1]:
        x = torch.cat([x[:, :distance], x[:, distance:] + decay[:, distance:] * x[:, :-distance]], dim=1)
        decay = torch.cat([decay[:, :distance], decay[:, distance:] * decay[:, :-distance]], dim=1)
        distance *= 2
    return x


class BlockLinear(nn.Module):
    """A linear map of each block of channels: a block-diagonal matrix, and a bias."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        if blocks < 1 or width % blocks:
            raise PlanError(
                f"{width} channels cannot be {blocks} blocks", code="bad-model", legal="blocks that divide the width"
            )
        self.block_width = width // blocks
        self.weight = nn.Parameter(torch.empty(blocks, self.block_width, self.block_width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / block width, no bias."""
        nn.init.normal_(self.weight, std=self.block_width**-0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, width]` to the same."""
        blocks = x.unflatten(-1, (-1, self.block_width))
        return torch.einsum("bski,koi->bsko", blocks, self.weight).reshape(x.shape) + self.bias


class GatedRecurrence(nn.Module):
    """RG-LRU: each channel decays by its own rate, faster where the recurrence gate opens, and takes in its gated input.

    r_t = sigmoid(W_r x_t)   i_t = sigmoid(W_i x_t)   a_t = sigmoid(rate)^(8 r_t)
    h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x_t
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.recurrence_gate = BlockLinear(width, blocks)
        self.input_gate = BlockLinear(width, blocks)
        self.rate = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Decays with open gates, sigmoid(rate)^8, uniform in [0.9, 0.999] (Griffin, section 2.4)."""
        with torch.no_grad():
            slow = self.rate.uniform_(0.9, 0.999).pow(1 / SHARPNESS)
            self.rate.copy_(torch.logit(slow))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, width]` to the same."""
        dtype = wide(x.dtype)
        r = self.recurrence_gate(x).to(dtype).sigmoid()
        i = self.input_gate(x).to(dtype).sigmoid()
        log_decay = -SHARPNESS * r * F.softplus(-self.rate.to(dtype))
        scale = torch.sqrt(-torch.expm1(2 * log_decay))  # exact also where the decay is close to one
        return linear_scan(log_decay.exp(), scale * i * x.to(dtype)).to(x.dtype)


class Recurrent(nn.Module):
    """Griffin's recurrent block: a gate beside a convolution and the recurrence.

    Arguments:
        dim, width: of the residual stream, and of the recurrence.
        blocks: of the gates' block-diagonal matrices.
        conv_width: taps of the convolution.
    """

    def __init__(self, dim: int, width: int, blocks: int, conv_width: int = 4) -> None:
        super().__init__()
        self.w_gate = nn.Linear(dim, width, bias=False)
        self.w_x = nn.Linear(dim, width, bias=False)
        self.conv = CausalConv(width, conv_width)
        self.recurrence = GatedRecurrence(width, blocks)
        self.w_out = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        return self.w_out(F.gelu(self.w_gate(x)) * self.recurrence(self.conv(self.w_x(x))))
