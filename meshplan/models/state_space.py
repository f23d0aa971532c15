"""A Mamba-2 mixer: a state of each head that decays, takes in and is read by amounts which the input decides."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.models.causal_conv import CausalConv
from meshplan.ops.precision import wide


def state_space_scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """The recurrence of every head, chunk by chunk (Dao and Gu 2024, "Transformers are SSMs", section 6):

        state_t = exp(log_decay_t) state_(t-1) + b_t x_t^T        y_t = c_t state_t        state_0 = 0

    Within a chunk of l tokens it is attention without a softmax, an l x l matrix of c_i.b_j times the decay from j to i;
    what came before is in the state, which goes from chunk to chunk.

    Arguments:
        x: [batch, seq, heads, p]; log_decay: [batch, seq, heads], not above zero; b, c: [batch, seq, heads, n].
        chunk: tokens a chunk; the last one may be shorter. The result does not depend on it.

    Returns:
        [batch, seq, heads, p].
    """
    state, outs = x.new_zeros(x.shape[0], x.shape[2], b.shape[3], x.shape[3]), []
    for x_l, log_l, b_l, c_l in zip(*(t.split(chunk, dim=1) for t in (x, log_decay, b, c)), strict=True):
        decayed = log_l.cumsum(1)  # since the chunk began, [batch, l, heads]
        from_to = decayed.unsqueeze(2) - decayed.unsqueeze(1)  # [batch, i, j, heads]
        later = torch.ones(from_to.shape[1:3], dtype=torch.bool, device=x.device).triu(1).unsqueeze(-1)
        # Masked before exp: what is above the diagonal may be large, and infinity has no useful gradient.
        mixed = from_to.masked_fill(later, float("-inf")).exp() * torch.einsum("bihn,bjhn->bijh", c_l, b_l)
        own = torch.einsum("bijh,bjhp->bihp", mixed, x_l)
        before = torch.einsum("bihn,bhnp->bihp", c_l, state) * decayed.exp().unsqueeze(-1)
        outs.append(own + before)
        left = (decayed[:, -1:] - decayed).exp().unsqueeze(-1)  # of each token at the chunk's end
        state = state * decayed[:, -1].exp()[..., None, None] + torch.einsum("bjhn,bjhp->bhnp", b_l * left, x_l)
    return torch.cat(outs, dim=1)


class StateSpace(nn.Module):
    """Mamba-2 (Dao and Gu 2024, section 7), its fused projection as one a part, so that each can be split by heads:

        w_gate, w_x [inner]   w_b, w_c [groups x state]   w_dt [heads]   w_out [dim],   inner = heads x head_dim

    Arguments:
        dim: width of the residual stream.
        n_heads, head_dim: heads, and width of each.
        n_groups, state: heads that share b and c are a group; numbers that b and c have, rows of a head's state.
        conv_width, chunk: taps of the convolutions; tokens a chunk.
        eps: of the norm, which is over the channels of a group.
    """

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        head_dim: int,
        n_groups: int,
        state: int,
        conv_width: int = 4,
        chunk: int = 64,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if n_groups < 1 or n_heads % n_groups:
            raise PlanError(
                f"{n_heads} heads cannot be {n_groups} groups", code="bad-model", legal="n_groups that divides n_heads"
            )
        inner = n_heads * head_dim
        self.head_dim, self.state, self.chunk, self.eps = head_dim, state, chunk, eps
        self.heads_a_group, self.group_width = n_heads // n_groups, inner // n_groups
        self.w_gate = nn.Linear(dim, inner, bias=False)
        self.w_x = nn.Linear(dim, inner, bias=False)
        self.w_b = nn.Linear(dim, n_groups * state, bias=False)
        self.w_c = nn.Linear(dim, n_groups * state, bias=False)
        self.w_dt = nn.Linear(dim, n_heads, bias=False)
        self.conv_x = CausalConv(inner, conv_width)
        self.conv_b = CausalConv(n_groups * state, conv_width)
        self.conv_c = CausalConv(n_groups * state, conv_width)
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.log_rate = nn.Parameter(torch.empty(n_heads))
        self.skip = nn.Parameter(torch.empty(n_heads))
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.w_out = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rates of decay uniform in [1, 16], steps log-uniform in [0.001, 0.1], as Mamba-2's code; the projections and
        convolutions have initialisers of their own."""
        with torch.no_grad():
            self.log_rate.uniform_(1, 16).log_()
            self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
            self.dt_bias.add_(torch.log(-torch.expm1(-self.dt_bias)))  # softplus makes the step of it
            self.skip.fill_(1.0)
            self.norm_weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` to `[batch, seq, dim]`."""
        dtype = wide(x.dtype)
        u = F.silu(self.conv_x(self.w_x(x))).unflatten(-1, (-1, self.head_dim)).to(dtype)
        b = F.silu(self.conv_b(self.w_b(x))).unflatten(-1, (-1, self.state)).to(dtype)
        c = F.silu(self.conv_c(self.w_c(x))).unflatten(-1, (-1, self.state)).to(dtype)
        b, c = b.repeat_interleave(self.heads_a_group, dim=2), c.repeat_interleave(self.heads_a_group, dim=2)
        step = F.softplus(self.w_dt(x).to(dtype) + self.dt_bias.to(dtype))
        log_decay = -self.log_rate.to(dtype).exp() * step
        y = state_space_scan(u * step.unsqueeze(-1), log_decay, b, c, self.chunk)
        y = (y + u * self.skip.to(dtype).unsqueeze(-1)).flatten(-2) * F.silu(self.w_gate(x).to(dtype))
        grouped = y.unflatten(-1, (-1, self.group_width))
        y = F.rms_norm(grouped, (self.group_width,), eps=self.eps).flatten(-2).to(x.dtype) * self.norm_weight
        return self.w_out(y)
