"""Rotary positions: angles, the two orders of pairs that checkpoints use, and how long contexts stretch frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies (as in Meta's reference code).

    Attributes:
        factor: how much longer the context became.
        low_freq_factor, high_freq_factor: wavelengths above `original_length / low` are stretched by `factor`, those
            below `original_length / high` are kept, and between the two the stretch is interpolated.
        original_length: context length before the stretch, in tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    amplitude = 1.0
    """Of cosines and sines."""

    def stretch(self, inv_freq: Tensor, theta: float) -> Tensor:
        """Frequencies `theta ** (-2 i / head_dim)` `[head_dim / 2]`, stretched."""
        turns = self.original_length * inv_freq / (2 * math.pi)
        # 1 keeps a frequency, 0 stretches it fully.
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return inv_freq * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's stretch (Peng et al. 2023, "YaRN", sections 3.2 and 3.4): frequencies that turn often are kept, slow ones are
    stretched, those between by a ramp over their index; and attention is sharpened, since a longer context flattens it.

    Attributes:
        factor: how much longer the context became.
        beta_fast, beta_slow: turns over the original context from which a frequency is kept, and up to which it is
            stretched fully.
        original_length: context length before the stretch, in tokens.
        truncate: the ramp begins and ends at whole indices, as in DeepSeek's code.
        sharpens: what the gain 0.1 ln(factor) + 1 multiplies: "rotary", cosines and sines, as YaRN and gpt-oss do; or
            "scores", all of q.k, twice, as DeepSeek does (an attention that is given `score_gain`).
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_length: int = 4096
    truncate: bool = True
    sharpens: str = "rotary"

    @property
    def gain(self) -> float:
        """0.1 ln(factor) + 1 (YaRN, section 3.4)."""
        return 0.1 * math.log(self.factor) + 1

    @property
    def amplitude(self) -> float:
        """Of cosines and sines."""
        return self.gain if self.sharpens == "rotary" else 1.0

    @property
    def score_gain(self) -> float:
        """What the product of whole queries and keys is multiplied by."""
        return self.gain**2 if self.sharpens == "scores" else 1.0

    def stretch(self, inv_freq: Tensor, theta: float) -> Tensor:
        """Frequencies `theta ** (-2 i / head_dim)` `[head_dim / 2]`, stretched."""
        half = inv_freq.shape[0]

        def index_of(turns: float) -> float:
            """The index i whose frequency turns so often over the original context."""
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        steps = torch.arange(half, device=inv_freq.device, dtype=inv_freq.dtype)
        stretched = ((steps - first) / max(last - first, 1e-3)).clamp(0, 1)
        return inv_freq * (1 - stretched + stretched / self.factor)


class Rotary(nn.Module):
    """Rotary position angles. The frequencies are recomputed, never saved, so they are a non-persistent buffer."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | Yarn | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.amplitude = 1.0 if scaling is None else scaling.amplitude
        self.register_buffer("inv_freq", torch.empty(head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the buffer: `theta ** (-2 i / head_dim)`, stretched by `scaling` (RoFormer, equation 15)."""
        device = self.inv_freq.device
        steps = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        inv_freq = self.theta ** -(steps / self.head_dim)
        if self.scaling is not None:
            inv_freq = self.scaling.stretch(inv_freq, self.theta)
        self.inv_freq.copy_(inv_freq)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Integer positions `[seq]` or `[batch, seq]` to cosines and sines `[..., seq, 1, head_dim / 2]`."""
        angles = (positions.unsqueeze(-1) * self.inv_freq).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        if self.amplitude != 1.0:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair `(i, i + head_dim / 2)` of `x` `[batch, seq, heads, head_dim]` by its angle (the half-split order
    of transformers' checkpoints, not the interleaved one of Meta's)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair `(2 i, 2 i + 1)` of `x` `[batch, seq, heads, head_dim]` by its angle (Meta's and DeepSeek's order)."""
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
