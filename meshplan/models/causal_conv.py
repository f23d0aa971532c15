"""A short causal convolution, each channel by itself: what state-space and recurrent mixers do before their recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConv(nn.Module):
    """y[t] = bias + sum over j of weight[j] x[t - width + 1 + j], with zeros before the sequence.

    Written as `width` products of shifted sequences, so that any share of the channels is computed alike.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's Conv1d: uniform within 1 / sqrt(width)."""
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -(self.width**-0.5), self.width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, channels]` to the same."""
        seq, padded = x.shape[1], F.pad(x, (0, 0, self.width - 1, 0))
        y: Tensor = self.bias
        for j in range(self.width):
            y = y + padded[:, j : j + seq] * self.weight[j]
        return y
