"""The gated linear recurrence against Griffin's equations, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.models.recurrent import BlockLinear, GatedRecurrence, Recurrent, linear_scan

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(decay: Tensor, x: Tensor) -> Tensor:
    h, outs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


@pytest.mark.parametrize("seq", [1, 2, 3, 7, 8, 9, 33])
def test_the_scan_is_the_loop_and_so_are_its_gradients(seq):
    leaves = [randn(2, seq, 3).requires_grad_(), randn(2, seq, 3, seed=2).requires_grad_()]
    grad = randn(2, seq, 3, seed=3)
    got, want = linear_scan(*leaves), loop(*leaves)
    torch.testing.assert_close(got, want, **EXACT)
    # The first decay meets a state of zero: its gradient is zero in the loop, and none at all is as good.
    pairs = zip(*(torch.autograd.grad((y * grad).sum(), leaves, allow_unused=True) for y in (got, want)), strict=True)
    for leaf, (a, b) in zip(leaves, pairs, strict=True):
        torch.testing.assert_close(torch.zeros_like(leaf) if a is None else a, b, **EXACT)


def recurrence() -> GatedRecurrence:
    torch.manual_seed(1)
    made = GatedRecurrence(6, 2).double()
    with torch.no_grad():
        for gate in (made.recurrence_gate, made.input_gate):
            gate.bias.normal_()
    return made


def test_the_recurrence_is_griffins():
    m, x = recurrence(), randn(2, 7, 6)

    def gate(linear: BlockLinear, row: Tensor) -> Tensor:
        whole = torch.block_diag(*linear.weight)
        return 1 / (1 + torch.exp(-(whole @ row + linear.bias)))

    want = []
    for rows in x:
        h, outs = torch.zeros(6).double(), []
        for row in rows:
            a = (1 / (1 + torch.exp(-m.rate))) ** (8 * gate(m.recurrence_gate, row))
            h = a * h + (1 - a**2).sqrt() * gate(m.input_gate, row) * row
            outs.append(h)
        want.append(torch.stack(outs))
    want = torch.stack(want)
    torch.testing.assert_close(m(x), want, **EXACT)
    grad, parameters = randn(2, 7, 6, seed=4), list(m.parameters())
    for a, b in zip(
        torch.autograd.grad((m(x) * grad).sum(), parameters),
        torch.autograd.grad((want * grad).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_block_is_a_gate_beside_convolution_and_recurrence():
    torch.manual_seed(1)
    block, x = Recurrent(5, 6, 2).double(), randn(2, 7, 5)
    inner = loop_of(block, x)
    gate = x @ block.w_gate.weight.T
    gate = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
    torch.testing.assert_close(block(x), (gate * inner) @ block.w_out.weight.T, **EXACT)


def loop_of(block: Recurrent, x: Tensor) -> Tensor:
    z = x @ block.w_x.weight.T
    rows = []
    for t in range(7):
        taps = [block.conv.weight[j] * z[:, t - 3 + j] for j in range(4) if t - 3 + j >= 0]
        rows.append(sum(taps, block.conv.bias))
    return block.recurrence(torch.stack(rows, 1))


def test_decays_start_between_their_bounds_and_near_one_they_are_exact():
    m = GatedRecurrence(500, 1)
    slow = m.rate.sigmoid() ** 8
    assert 0.9 <= slow.min() < 0.91 and 0.99 < slow.max() < 0.9991
    # 1 - a^2 of a decay that float32 rounds to one.
    with torch.no_grad():
        m.rate.fill_(25.0)
        m.recurrence_gate.bias.fill_(30.0)
        m.input_gate.bias.fill_(30.0)
        for gate in (m.recurrence_gate, m.input_gate):
            gate.weight.zero_()
    rate = torch.sigmoid(torch.tensor(25.0).double()) ** 8
    torch.testing.assert_close(m(torch.ones(1, 1, 500)), (1 - rate**2).sqrt().float().expand(1, 1, 500))


def test_a_width_that_blocks_do_not_divide_is_refused():
    with pytest.raises(PlanError) as error:
        Recurrent(5, 6, 4)
    assert error.value.code == "bad-model"


def test_half_precision_keeps_its_dtype():
    assert Recurrent(5, 6, 2).bfloat16()(randn(1, 3, 5).bfloat16()).dtype == torch.bfloat16
