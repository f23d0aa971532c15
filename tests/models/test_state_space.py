"""The state-space mixer against its recurrence, token by token, and against transformers' Mamba-2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.models.causal_conv import CausalConv
from meshplan.models.state_space import StateSpace, state_space_scan
from tests.models.against import InFloat64

EXACT = {"rtol": 1e-11, "atol": 1e-11}
DIM, HEADS, P, GROUPS, N = 11, 6, 5, 3, 4


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(seq: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    decay = -randn(2, seq, HEADS, seed=2).exp()
    return randn(2, seq, HEADS, P), decay, randn(2, seq, HEADS, N, seed=3), randn(2, seq, HEADS, N, seed=4)


def token_by_token(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state, outs = x.new_zeros(2, HEADS, N, P), []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp()[..., None, None] * state + b[:, t, :, :, None] * x[:, t, :, None, :]
        outs.append((c[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outs, 1)


@pytest.mark.parametrize(("seq", "chunk"), [(1, 4), (7, 3), (8, 4), (13, 5), (13, 64), (9, 1)])
def test_any_chunk_gives_the_recurrence_and_its_gradients(seq, chunk):
    leaves = [t.requires_grad_() for t in problem(seq)]
    grad = randn(2, seq, HEADS, P, seed=5)
    got, want = state_space_scan(*leaves, chunk), token_by_token(*leaves)
    torch.testing.assert_close(got, want, **EXACT)
    for a, b in zip(
        torch.autograd.grad((got * grad).sum(), leaves), torch.autograd.grad((want * grad).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, **EXACT)


def test_states_that_vanish_at_once_leave_no_infinity():
    x, decay, b, c = problem(6)
    leaves = [x.requires_grad_(), (decay * 1e4).detach().requires_grad_(), b.requires_grad_(), c.requires_grad_()]
    y = state_space_scan(*leaves, 6)
    torch.testing.assert_close(y, (c * b).sum(-1, keepdim=True) * x)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


def test_convolution_is_torchs_over_zeros_before_the_sequence():
    torch.manual_seed(1)
    conv, x = CausalConv(DIM, 4).double(), randn(2, 7, DIM)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    want = torch.nn.functional.conv1d(padded, conv.weight.T.unsqueeze(1), conv.bias, groups=DIM)
    torch.testing.assert_close(conv(x), want.transpose(1, 2), **EXACT)


def mixer(**options: int) -> StateSpace:
    torch.manual_seed(1)
    sizes = {"n_heads": HEADS, "head_dim": P, "n_groups": GROUPS, "state": N, "chunk": 4, **options}
    made = StateSpace(DIM, **sizes).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


def test_the_mixer_is_the_papers_token_by_token():
    m, x = mixer(), randn(1, 9, DIM)

    def conv(name: str, z: Tensor) -> list[Tensor]:
        c = getattr(m, f"conv_{name}")
        rows = [sum((c.weight[j] * z[t - 3 + j] for j in range(4) if t - 3 + j >= 0), c.bias) for t in range(9)]
        return [row * torch.sigmoid(row) for row in rows]

    row = x[0]
    u, b, c = (conv(n, row @ getattr(m, f"w_{n}").weight.T) for n in "xbc")
    gate = row @ m.w_gate.weight.T
    state, outs = [torch.zeros(N, P).double() for _ in range(HEADS)], []
    for t in range(9):
        y = []
        for h in range(HEADS):
            dt = torch.log1p(torch.exp(m.w_dt.weight[h] @ row[t] + m.dt_bias[h]))
            group = slice(h // 2 * N, h // 2 * N + N)
            own = u[t][h * P : h * P + P]
            state[h] = torch.exp(-torch.exp(m.log_rate[h]) * dt) * state[h] + dt * torch.outer(b[t][group], own)
            y.append(c[t][group] @ state[h] + m.skip[h] * own)
        z = torch.cat(y) * gate[t] * torch.sigmoid(gate[t])
        z = torch.cat([part / (part.square().mean() + 1e-5).sqrt() for part in z.split(10)])
        outs.append(m.w_out.weight @ (z * m.norm_weight))
    want = torch.stack(outs)
    torch.testing.assert_close(m(x)[0], want, **EXACT)
    grad = randn(9, DIM, seed=6)
    parameters = list(m.parameters())
    for a, b in zip(
        torch.autograd.grad((m(x)[0] * grad).sum(), parameters),
        torch.autograd.grad((want * grad).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_the_mixer_is_that_of_transformers():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=15, expand=2, num_heads=HEADS, head_dim=P, n_groups=1, state_size=N, conv_kernel=4, chunk_size=4
    )
    theirs = Mamba2Mixer(config, layer_idx=0).double()
    torch.manual_seed(1)
    # Their norm is over all channels, ours over those of a group: equal for one.
    ours = StateSpace(15, n_heads=HEADS, head_dim=P, n_groups=1, state=N, chunk=5).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    parts = [ours.w_gate, ours.w_x, ours.w_b, ours.w_c, ours.w_dt]
    convs = [ours.conv_x, ours.conv_b, ours.conv_c]
    theirs.load_state_dict(
        {
            "in_proj.weight": torch.cat([part.weight for part in parts]),
            "conv1d.weight": torch.cat([conv.weight for conv in convs], 1).T.unsqueeze(1),
            "conv1d.bias": torch.cat([conv.bias for conv in convs]),
            "dt_bias": ours.dt_bias,
            "A_log": ours.log_rate,
            "D": ours.skip,
            "norm.weight": ours.norm_weight,
            "out_proj.weight": ours.w_out.weight,
        }
    )
    x = randn(2, 11, 15)
    with InFloat64():
        torch.testing.assert_close(ours(x), theirs(x), **EXACT)


def test_heads_that_are_no_whole_groups_are_refused():
    with pytest.raises(PlanError) as error:
        mixer(n_groups=4)
    assert error.value.code == "bad-model"


def test_initial_steps_and_rates_are_in_their_ranges():
    m = StateSpace(DIM, n_heads=600, head_dim=1, n_groups=1, state=2)
    step, rate = torch.nn.functional.softplus(m.dt_bias), m.log_rate.exp()
    assert 0.9e-3 < step.min() < 3e-3 and 0.05 < step.max() < 0.11
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16


def test_half_precision_keeps_its_dtype_and_stays_near():
    m, x = mixer(), randn(2, 9, DIM)
    half = mixer().bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), m(x), rtol=0.1, atol=0.1)
