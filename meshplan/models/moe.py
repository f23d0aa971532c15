"""A mixture-of-experts block: router, routed experts, and experts that every token goes through."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.models.experts import GATES, ExpertList, PackedExperts
from meshplan.models.llama import FeedForward
from meshplan.models.router import Router, RouterConfig, Routing

FORMS = ("packed", "list")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """How experts are built.

    Attributes:
        form: `packed` weights or a `list` of modules; the options below are those of packed ones.
        gate, has_bias, is_concatenated, is_transposed: as in `PackedExperts`.
    """

    form: str = "packed"
    gate: str = "swiglu"
    has_bias: bool = False
    is_concatenated: bool = True
    is_transposed: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS or self.gate not in GATES:
            raise PlanError(
                f"experts cannot be a {self.form!r} with {self.gate!r}",
                code="bad-model",
                legal=f"form: {', '.join(FORMS)}; gate: {', '.join(GATES)}",
            )
        plain = (self.gate, self.has_bias, self.is_concatenated, self.is_transposed) == ("swiglu", False, True, False)
        if self.form == "list" and not plain:
            raise PlanError(
                "a list of experts has plain SwiGLU experts without biases",
                code="bad-model",
                legal="form='packed' for other experts",
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and options of a mixture of experts.

    Attributes:
        dim, expert_dim: width of tokens, and of one expert.
        router, experts: how tokens are routed, and how experts are built.
        shared_dim: width of the SwiGLU that every token goes through beside its experts; 0 for none.
    """

    dim: int
    expert_dim: int
    router: RouterConfig
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    shared_dim: int = 0


class MoE(nn.Module):
    """The weighted sum of a token's experts, and of the shared one if there is one."""

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        n, e = c.router.n_experts, c.experts
        self.router = Router(c.dim, c.router)
        self.experts: PackedExperts | ExpertList
        if e.form == "list":
            self.experts = ExpertList(n, c.dim, c.expert_dim)
        else:
            self.experts = PackedExperts(
                n,
                c.dim,
                c.expert_dim,
                gate=e.gate,
                has_bias=e.has_bias,
                is_concatenated=e.is_concatenated,
                is_transposed=e.is_transposed,
            )
        self.shared_experts = FeedForward(c.dim, c.shared_dim) if c.shared_dim else None

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """`[batch, seq, dim]` to the same, and what the router decided for its tokens, batch by batch."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens)
        y = self.experts(tokens, routing.chosen, routing.weights).view_as(x)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y, routing
