"""Rotary angles against their formulas: both orders of pairs, and both ways to stretch frequencies."""

import math

import pytest
import torch

from meshplan.models.rotary import RopeScaling, Rotary, Yarn, rotate, rotate_adjacent


def test_stretched_rotary_keeps_fast_divides_slow_and_blends_between():
    got = Rotary(128, 500_000.0, RopeScaling()).inv_freq.double()
    plain = Rotary(128, 500_000.0, None).inv_freq.double()
    for have, frequency in zip(got, plain, strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            want = frequency
        elif wavelength > 8192:
            want = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            want = (1 - smooth) * frequency / 8 + smooth * frequency
        assert have.item() == pytest.approx(float(want), rel=1e-5)


def test_rotation_keeps_lengths():
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    cos, sin = Rotary(8, 100.0, None)(torch.arange(5))
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


def test_both_orders_turn_their_own_pairs():
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    cos, sin = Rotary(8, 100.0, None).double()(torch.arange(5))
    adjacent = rotate_adjacent(x, cos, sin)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * torch.complex(cos, sin)
    torch.testing.assert_close(adjacent, torch.view_as_real(turned).flatten(-2))
    halves = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    torch.testing.assert_close(rotate(halves, cos, sin), torch.cat([adjacent[..., ::2], adjacent[..., 1::2]], -1))


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_keeps_fast_divides_slow_and_ramps_between(truncate):
    theta, half, length, factor = 10_000.0, 32, 4096, 40.0
    got = Rotary(64, theta, Yarn(factor=factor, truncate=truncate)).inv_freq.double()
    # The index at which a frequency turns n times over the context: theta^(-i / half) length / 2 pi = n.
    first, last = (half * math.log(length / (2 * math.pi * n), theta) for n in (32.0, 1.0))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    for i, have in enumerate(got):
        frequency = theta ** (-i / half)
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        assert have.item() == pytest.approx(frequency * (1 - share) + frequency / factor * share, rel=1e-5)
    assert got[0].item() == pytest.approx(1.0) and got[-1].item() == pytest.approx(theta ** (-31 / 32) / 40, rel=1e-5)


def test_yarn_sharpens_cosines_or_scores():
    rotary, scores = Yarn(factor=32.0), Yarn(factor=40.0, sharpens="scores")
    assert rotary.amplitude == pytest.approx(1.3465735903) and rotary.score_gain == 1.0
    assert scores.amplitude == 1.0 and scores.score_gain == pytest.approx(1.3688879454**2)
    plain, sharp = Rotary(8, 100.0, None), Rotary(8, 100.0, Yarn(factor=32.0))
    sharp.inv_freq.copy_(plain.inv_freq)
    for a, b in zip(sharp(torch.arange(5)), plain(torch.arange(5)), strict=True):
        torch.testing.assert_close(a, b * 1.3465735903)
