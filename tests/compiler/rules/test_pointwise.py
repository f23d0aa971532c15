"""Elementwise calls: every layout they are run in holds by value, and partial sums pass only where a call is linear."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.rules.held import accepted, f, ids, kinds_of, mask, wrong

T = torch.Tensor
CALLS: list[tuple[Any, ...]] = [
    (torch.add, f(3, 4), f(3, 4)),
    (torch.add, f(3, 4), f(4)),
    (torch.add, f(3, 1), f(1, 5)),
    (torch.add, f(3, 4), 2.0),
    (torch.sub, f(3, 4), f(3, 1)),
    (T.__rsub__, f(3, 4), 2.0),
    (torch.mul, f(3, 4), f(4)),
    (torch.mul, f(3, 4), 2.0),
    (torch.div, f(3, 4), f(3, 4)),
    (torch.div, f(3, 4), 3.0),
    (torch.div, f(6, 4), f(6, 1)),
    (T.__rtruediv__, f(3, 4), 2.0),
    (T.add_, f(3, 4), f(4)),
    (T.mul_, f(3, 4), f(3, 4)),
    (T.sub_, f(3, 4), 1.0),
    (torch.neg, f(3, 4)),
    (torch.exp, f(3, 4)),
    (torch.pow, f(3, 4), 2),
    (torch.sqrt, f(3, 4)),
    (T.float, f(3, 4)),
    (T.to, f(3, 4), torch.float32),
    (T.long, f(3, 4)),
    (torch.where, mask(3, 4), f(3, 4), f(3, 4)),
    (torch.where, mask(4), f(3, 4), f(4)),
    (T.masked_fill, f(3, 4), mask(3, 4), 0.0),
    (T.masked_fill, f(3, 4), mask(4), -1.0),
    (T.masked_fill_, f(3, 4), mask(3, 4), 0.0),
    (torch.clamp, f(3, 4), -1.0, 1.0),
    (torch.lerp, f(3, 4), f(3, 4), 0.3),
    (torch.addcmul, f(3, 4), f(3, 4), f(4)),
    (torch.addcdiv, f(3, 4), f(3, 4), f(4)),
    (F.relu, f(3, 4)),
    (F.gelu, f(3, 4)),
    (F.silu, f(3, 4)),
    (F.softplus, f(3, 4)),
    (F.hardtanh, f(3, 4)),
    (F.logsigmoid, f(3, 4)),
    (F.leaky_relu, f(3, 4)),
    (torch.maximum, f(3, 4), f(4)),
    (torch.abs, f(3, 4)),
    (torch.complex, f(3, 4), f(3, 4)),
    (torch.polar, f(3, 4), f(3, 4)),
    (torch.zeros_like, f(3, 4)),
    (T.clone, f(3, 4)),
    (T.detach, f(3, 4)),
    (T.contiguous, f(3, 4)),
    (T.type_as, f(3, 4), f(3, 4)),
    (T.copy_, f(3, 4), f(4)),
    (T.fill_, f(3, 4), 2.0),
    (T.bool, ids(3, 4)),
    (torch.logical_and, mask(3, 4), mask(4)),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c[0].__name__)
def test_every_accepted_layout_holds(call: tuple[Any, ...], n: int) -> None:
    uses = list(accepted(*call, n=n))
    assert uses
    assert wrong(iter(uses)) == []


@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ones=st.lists(st.booleans(), min_size=3, max_size=3),
    shorter=st.integers(0, 2),
)
def test_broadcasting_holds_for_any_shapes(shape: list[int], ones: list[bool], shorter: int) -> None:
    other = [1 if one else s for s, one in zip(shape, ones, strict=False)][min(shorter, len(shape) - 1) :]
    assert wrong(accepted(torch.mul, f(*shape), f(*other), n=2)) == []


def test_a_number_added_to_a_partial_sum_is_refused() -> None:
    assert ("P", "->", "P") not in kinds_of(torch.add, f(3, 4), 1.0)
    assert ("A", "->", "A") in kinds_of(torch.add, f(3, 4), 1.0)


def test_a_replicated_value_added_to_a_partial_sum_is_refused() -> None:
    found = kinds_of(torch.add, f(3, 4), f(3, 4))
    assert ("P", "R", "->", "P") not in found
    assert ("P", "P", "->", "P") in found


def test_nothing_that_is_not_linear_takes_a_partial_sum() -> None:
    for func in (torch.exp, torch.abs, F.relu, F.gelu, torch.sqrt, torch.tanh):
        assert not any("P" in k or "A" in k for k in kinds_of(func, f(3, 4)))
    assert ("P", "P", "->", "P") not in kinds_of(torch.mul, f(3, 4), f(3, 4))
    assert ("R", "P", "->", "P") not in kinds_of(torch.div, f(3, 4), f(3, 4))


def test_a_cast_to_integers_does_not_take_a_partial_sum() -> None:
    assert kinds_of(T.long, f(3, 4)) == {("S(0)", "->", "S(0)"), ("S(1)", "->", "S(1)")}
