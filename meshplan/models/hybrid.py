"""Models written as a pattern of blocks: `AEMEAEMEAEMR` is attention, experts, Mamba, experts, ..., recurrence.

    A   causal grouped-query attention      `layers.N.attention`
    E   a mixture of experts                `layers.N.moe`
    M   a Mamba-2 state-space mixer         `layers.N.state_space`
    R   a gated linear recurrence           `layers.N.recurrent`

One letter, one block: a norm, the mixer, and the sum with the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.models.decoder import Decoder
from meshplan.models.llama import Attention, LlamaConfig
from meshplan.models.moe import MoE, MoEConfig
from meshplan.models.recurrent import Recurrent
from meshplan.models.rotary import Rotary
from meshplan.models.router import RouterConfig, Routing
from meshplan.models.router_losses import RouterLosses
from meshplan.models.state_space import StateSpace

LETTERS = {"A": "attention", "E": "moe", "M": "state_space", "R": "recurrent"}
"""What each letter of a pattern is, and the name of the module."""

EXAMPLE = "AEMEAEMEAEMR"


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """A pattern and the sizes of its blocks; the defaults are tiny.

    Attributes:
        pattern: one letter of `LETTERS` a block.
        dim, vocab_size: width of the residual stream, rows of embedding and head.
        n_heads, n_kv_heads, head_dim: of A.
        n_experts, top_k, expert_dim, shared_dim: of E, as in `MoEConfig`; softmax scores, normalised weights.
        ssm_heads, ssm_head_dim, ssm_groups, ssm_state, ssm_chunk: of M, as in `StateSpace`.
        lru_width, lru_blocks: of R, as in `Recurrent`.
        conv_width: taps of the convolutions of M and R.
        losses: router losses, or None.
    """

    pattern: str
    dim: int = 32
    vocab_size: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 8
    n_experts: int = 4
    top_k: int = 2
    expert_dim: int = 20
    shared_dim: int = 0
    ssm_heads: int = 4
    ssm_head_dim: int = 10
    ssm_groups: int = 2
    ssm_state: int = 6
    ssm_chunk: int = 16
    lru_width: int = 28
    lru_blocks: int = 4
    conv_width: int = 4
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    losses: RouterLosses | None = None

    def __post_init__(self) -> None:
        legal = "one letter a block: " + ", ".join(f"{letter} {name}" for letter, name in LETTERS.items())
        if not self.pattern:
            raise PlanError("a pattern without a letter is no model", code="bad-model", legal=legal)
        for place, letter in enumerate(self.pattern):
            if letter not in LETTERS:
                raise PlanError(
                    f"letter {place + 1} of pattern {self.pattern!r} is {letter!r}", code="bad-model", legal=legal
                )

    @property
    def attention(self) -> LlamaConfig:
        """The attention of A, as that of a Llama."""
        return LlamaConfig(
            dim=self.dim,
            n_layers=len(self.pattern),
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            ffn_dim=self.expert_dim,
            vocab_size=self.vocab_size,
            norm_eps=self.norm_eps,
        )

    @property
    def moe(self) -> MoEConfig:
        """The mixture of experts of E."""
        router = RouterConfig(n_experts=self.n_experts, top_k=self.top_k)
        return MoEConfig(dim=self.dim, expert_dim=self.expert_dim, router=router, shared_dim=self.shared_dim)


class HybridBlock(nn.Module):
    """One letter: a norm and its mixer, added to the residual stream."""

    def __init__(self, letter: str, c: HybridConfig) -> None:
        super().__init__()
        self.letter = letter
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c.attention) if letter == "A" else None
        self.moe = MoE(c.moe) if letter == "E" else None
        self.state_space = _state_space(c) if letter == "M" else None
        self.recurrent = Recurrent(c.dim, c.lru_width, c.lru_blocks, c.conv_width) if letter == "R" else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing | None]:
        """`[batch, seq, dim]` to the same, and what the block's router decided, if it has one."""
        h = self.norm(x)
        if self.attention is not None:
            return x + self.attention(h, cos, sin), None
        if self.moe is not None:
            y, routing = self.moe(h)
            return x + y, routing
        if self.state_space is not None:
            return x + self.state_space(h), None
        assert self.recurrent is not None
        return x + self.recurrent(h), None


def _state_space(c: HybridConfig) -> StateSpace:
    return StateSpace(
        c.dim,
        n_heads=c.ssm_heads,
        head_dim=c.ssm_head_dim,
        n_groups=c.ssm_groups,
        state=c.ssm_state,
        conv_width=c.conv_width,
        chunk=c.ssm_chunk,
        eps=c.norm_eps,
    )


class Hybrid(Decoder):
    """A language model of the blocks that a pattern names."""

    def __init__(self, config: HybridConfig) -> None:
        c = config
        super().__init__(
            vocab_size=c.vocab_size,
            dim=c.dim,
            eps=c.norm_eps,
            rotary=Rotary(c.head_dim, c.rope_theta, None),
            layers=(HybridBlock(letter, c) for letter in c.pattern),
            losses=c.losses,
        )
        self.config = c


def hybrid(pattern: str, **sizes: Any) -> Hybrid:
    """A model of `pattern`, tiny where `sizes`, fields of `HybridConfig`, do not say otherwise.

    Raises:
        PlanError: `bad-model` for a letter that no block has, and sizes that do not fit each other.
    """
    return Hybrid(HybridConfig(pattern=pattern, **sizes))


def hybrid_large(pattern: str) -> Hybrid:
    """A model of `pattern` with blocks of published widths, which nobody trained together: attention and experts of Jamba
    (Lieber et al. 2024), the Mamba-2 mixer of Nemotron-H-8B (NVIDIA 2025), the recurrence of RecurrentGemma-9B (Botev
    et al. 2024). Meta only, unless there is memory to spare."""
    return hybrid(
        pattern,
        dim=4096,
        vocab_size=65536,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        n_experts=16,
        top_k=2,
        expert_dim=14336,
        ssm_heads=128,
        ssm_head_dim=64,
        ssm_groups=8,
        ssm_state=128,
        ssm_chunk=128,
        lru_width=4096,
        lru_blocks=16,
    )
