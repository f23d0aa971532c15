"""A Llama whose feed-forwards are routed experts: Mixtral, and with norms on queries and keys Qwen3-MoE."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.models.decoder import Block, Decoder
from meshplan.models.llama import Attention, LlamaConfig, refuse_options
from meshplan.models.moe import ExpertsConfig, MoE, MoEConfig
from meshplan.models.rotary import Rotary
from meshplan.models.router import RouterConfig
from meshplan.models.router_losses import RouterLosses


@dataclass(frozen=True, kw_only=True)
class MoELlamaConfig(LlamaConfig):
    """Sizes and options of a Llama with experts: those of a Llama, where `ffn_dim` is the width of one expert.

    Attributes:
        n_experts, top_k: experts of a layer, and how many of them a token goes to; softmax scores, normalised weights.
        expert_form: `packed` weights, or a `list` of modules.
        losses: router losses, or None.
    """

    n_experts: int
    top_k: int
    expert_form: str = "packed"
    losses: RouterLosses | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_options(self, "tied", "dropout")
        self.moe  # noqa: B018  refuses what no router can be

    @property
    def moe(self) -> MoEConfig:
        """The mixture of experts of each layer."""
        router = RouterConfig(n_experts=self.n_experts, top_k=self.top_k)
        return MoEConfig(
            dim=self.dim, expert_dim=self.ffn_dim, router=router, experts=ExpertsConfig(form=self.expert_form)
        )


class MoELlama(Decoder):
    """A Mixtral or a Qwen3-MoE."""

    def __init__(self, config: MoELlamaConfig) -> None:
        c = config
        super().__init__(
            vocab_size=c.vocab_size,
            dim=c.dim,
            eps=c.norm_eps,
            rotary=Rotary(c.head_width, c.rope_theta, c.rope_scaling),
            layers=(Block(c.dim, c.norm_eps, Attention(c), MoE(c.moe)) for _ in range(c.n_layers)),
            losses=c.losses,
        )
        self.config = c


def mixtral_tiny() -> MoELlama:
    """A byte-level Mixtral of 0.1 M parameters: 2 blocks of 4 experts, a token goes to 2."""
    return MoELlama(
        MoELlamaConfig(
            dim=48,
            n_layers=2,
            n_heads=6,
            n_kv_heads=2,
            ffn_dim=56,
            vocab_size=256,
            rope_theta=1e6,
            n_experts=4,
            top_k=2,
        )
    )


def mixtral_8x7b() -> MoELlama:
    """Mixtral 8x7B (Jiang et al. 2024, "Mixtral of Experts", table 1; rotary base of the published configuration)."""
    return MoELlama(
        MoELlamaConfig(
            dim=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            ffn_dim=14336,
            vocab_size=32000,
            rope_theta=1e6,
            n_experts=8,
            top_k=2,
            losses=RouterLosses(load_balance=0.02),
        )
    )


def qwen3_moe_tiny() -> MoELlama:
    """A byte-level Qwen3-MoE of 0.1 M parameters: 2 blocks of 8 experts, a token goes to 4."""
    return MoELlama(
        MoELlamaConfig(
            dim=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            ffn_dim=24,
            vocab_size=256,
            norm_eps=1e-6,
            rope_theta=1e6,
            qk_norm=True,
            n_experts=8,
            top_k=4,
        )
    )


def qwen3_30b_a3b() -> MoELlama:
    """Qwen3-30B-A3B (Qwen Team 2025, "Qwen3 Technical Report", table 2; widths of the published configuration)."""
    return _qwen3(dim=2048, n_layers=48, n_heads=32, ffn_dim=768)


def qwen3_235b_a22b() -> MoELlama:
    """Qwen3-235B-A22B (as `qwen3_30b_a3b`). Meta only, unless there is half a terabyte to spare."""
    return _qwen3(dim=4096, n_layers=94, n_heads=64, ffn_dim=1536)


def _qwen3(*, dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> MoELlama:
    return MoELlama(
        MoELlamaConfig(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=4,
            head_dim=128,
            ffn_dim=ffn_dim,
            vocab_size=151936,
            norm_eps=1e-6,
            rope_theta=1e6,
            qk_norm=True,
            n_experts=128,
            top_k=8,
            losses=RouterLosses(load_balance=0.001),
        )
    )
