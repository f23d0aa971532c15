"""DeepSeek-V3: latent attention, dense layers first, then experts with sigmoid scores, limited groups and a shared one."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.models.decoder import Block, Decoder
from meshplan.models.latent_attention import LatentAttention
from meshplan.models.llama import FeedForward
from meshplan.models.moe import ExpertsConfig, MoE, MoEConfig
from meshplan.models.rotary import Rotary, Yarn
from meshplan.models.router import RouterConfig
from meshplan.models.router_losses import RouterLosses


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig:
    """Sizes of a DeepSeek-V3, without its multi-token prediction module.

    Attributes:
        dim, n_layers, n_heads, vocab_size: width, blocks, heads, rows of embedding and head.
        q_rank, kv_rank, nope_dim, rope_dim, v_dim: as in `LatentAttention`.
        n_dense, dense_dim: how many of the first layers are dense, and the width of their SwiGLU.
        n_experts, top_k, expert_dim, shared_dim: routed experts, how many a token goes to, width of each, and of the
            shared one.
        n_groups, top_groups, scaling: as in `RouterConfig`.
        expert_form: `packed` weights, or a `list` of modules.
        rope_scaling: stretched rotary frequencies, or None.
        losses: router losses, or None.
    """

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    n_dense: int
    dense_dim: int
    n_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int
    n_groups: int
    top_groups: int
    scaling: float = 2.5
    expert_form: str = "packed"
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Yarn | None = None
    losses: RouterLosses | None = None

    def __post_init__(self) -> None:
        self.moe  # noqa: B018  refuses what no router can be

    @property
    def moe(self) -> MoEConfig:
        """The mixture of experts of the layers that are not dense."""
        router = RouterConfig(
            n_experts=self.n_experts,
            top_k=self.top_k,
            score="sigmoid",
            scaling=self.scaling,
            n_groups=self.n_groups,
            top_groups=self.top_groups,
            balance_bias=True,
        )
        return MoEConfig(
            dim=self.dim,
            expert_dim=self.expert_dim,
            router=router,
            experts=ExpertsConfig(form=self.expert_form),
            shared_dim=self.shared_dim,
        )


class DeepSeekV3(Decoder):
    """A DeepSeek-V3 (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1)."""

    def __init__(self, config: DeepSeekConfig) -> None:
        c = config
        super().__init__(
            vocab_size=c.vocab_size,
            dim=c.dim,
            eps=c.norm_eps,
            rotary=Rotary(c.rope_dim, c.rope_theta, c.rope_scaling),
            layers=(_block(c, dense=i < c.n_dense) for i in range(c.n_layers)),
            losses=c.losses,
            score="sigmoid",
        )
        self.config = c


def _block(c: DeepSeekConfig, dense: bool) -> Block:
    attention = LatentAttention(
        c.dim,
        c.n_heads,
        q_rank=c.q_rank,
        kv_rank=c.kv_rank,
        nope_dim=c.nope_dim,
        rope_dim=c.rope_dim,
        v_dim=c.v_dim,
        eps=c.norm_eps,
        score_gain=1.0 if c.rope_scaling is None else c.rope_scaling.score_gain,
    )
    return Block(c.dim, c.norm_eps, attention, FeedForward(c.dim, c.dense_dim) if dense else MoE(c.moe))


def deepseek_tiny() -> DeepSeekV3:
    """A byte-level DeepSeek-V3 of 0.1 M parameters: a dense layer and 2 of 8 experts in 4 groups, a token goes to 3."""
    return DeepSeekV3(
        DeepSeekConfig(
            dim=32,
            n_layers=3,
            n_heads=4,
            vocab_size=256,
            q_rank=24,
            kv_rank=16,
            nope_dim=8,
            rope_dim=4,
            v_dim=6,
            n_dense=1,
            dense_dim=80,
            n_experts=8,
            top_k=3,
            expert_dim=20,
            shared_dim=20,
            n_groups=4,
            top_groups=2,
        )
    )


def deepseek_v3() -> DeepSeekV3:
    """DeepSeek-V3, 671 B parameters, 37 B a token (technical report, section 4.2; rotary stretch as in the published
    configuration, loss factor as in section 4.2). Meta only."""
    return DeepSeekV3(
        DeepSeekConfig(
            dim=7168,
            n_layers=61,
            n_heads=128,
            vocab_size=129280,
            q_rank=1536,
            kv_rank=512,
            nope_dim=128,
            rope_dim=64,
            v_dim=128,
            n_dense=3,
            dense_dim=18432,
            n_experts=256,
            top_k=8,
            expert_dim=2048,
            shared_dim=2048,
            n_groups=8,
            top_groups=4,
            rope_scaling=Yarn(factor=40.0, sharpens="scores"),
            losses=RouterLosses(sequence=1e-4),
        )
    )
