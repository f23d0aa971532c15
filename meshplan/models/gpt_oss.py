"""gpt-oss: attention with sinks and biases, every other layer in a sliding window, experts with a clamped gate."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.errors import PlanError
from meshplan.models.decoder import Block, Decoder
from meshplan.models.llama import LlamaConfig, refuse_options
from meshplan.models.moe import ExpertsConfig, MoE, MoEConfig
from meshplan.models.rotary import Rotary, Yarn
from meshplan.models.router import RouterConfig
from meshplan.models.router_losses import RouterLosses
from meshplan.models.sink_attention import SinkAttention


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(LlamaConfig):
    """Sizes of a gpt-oss: those of a Llama, where `ffn_dim` is the width of one expert.

    Attributes:
        n_experts, top_k: experts of a layer, and how many of them a token goes to.
        window: tokens that the first, third, ... layer sees, itself among them; the others see all.
        losses: router losses, or None.
    """

    n_experts: int
    top_k: int
    window: int
    rope_theta: float = 150_000.0
    losses: RouterLosses | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_options(self, "tied", "qk_norm", "dropout")
        if self.window < 1:
            raise PlanError(f"a token cannot see {self.window} tokens", code="bad-model", legal="window >= 1")
        self.moe  # noqa: B018  refuses what no router can be

    @property
    def moe(self) -> MoEConfig:
        """The mixture of experts of each layer."""
        experts = ExpertsConfig(gate="clamped_swiglu", has_bias=True, is_concatenated=False, is_transposed=True)
        # Softmax over the chosen scores alone is softmax over all, with the weights of the chosen normalised.
        router = RouterConfig(n_experts=self.n_experts, top_k=self.top_k, linear_bias=True)
        return MoEConfig(dim=self.dim, expert_dim=self.ffn_dim, router=router, experts=experts)


class GptOss(Decoder):
    """A gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2)."""

    def __init__(self, config: GptOssConfig) -> None:
        c = config
        super().__init__(
            vocab_size=c.vocab_size,
            dim=c.dim,
            eps=c.norm_eps,
            rotary=Rotary(c.head_width, c.rope_theta, c.rope_scaling),
            layers=(_block(c, window=c.window if i % 2 == 0 else None) for i in range(c.n_layers)),
            losses=c.losses,
        )
        self.config = c


def _block(c: GptOssConfig, window: int | None) -> Block:
    attention = SinkAttention(c.dim, c.n_heads, c.n_kv_heads, c.head_width, window)
    return Block(c.dim, c.norm_eps, attention, MoE(c.moe))


def gpt_oss_tiny() -> GptOss:
    """A byte-level gpt-oss of 0.1 M parameters: windows of 5 bytes and of all, 4 experts, a token goes to 2."""
    return GptOss(
        GptOssConfig(
            dim=40,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=12,
            ffn_dim=36,
            vocab_size=256,
            n_experts=4,
            top_k=2,
            window=5,
        )
    )


def gpt_oss_20b() -> GptOss:
    """gpt-oss-20b (model card, table 1; widths of the published configuration)."""
    return _published(n_layers=24, n_experts=32)


def gpt_oss_120b() -> GptOss:
    """gpt-oss-120b (as `gpt_oss_20b`). Meta only, unless there is a quarter of a terabyte to spare."""
    return _published(n_layers=36, n_experts=128)


def _published(*, n_layers: int, n_experts: int) -> GptOss:
    return GptOss(
        GptOssConfig(
            dim=2880,
            n_layers=n_layers,
            n_heads=64,
            n_kv_heads=8,
            head_dim=64,
            ffn_dim=2880,
            vocab_size=201088,
            rope_scaling=Yarn(factor=32.0, truncate=False),
            n_experts=n_experts,
            top_k=4,
            window=128,
        )
    )
