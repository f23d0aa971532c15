"""A call's stand-in has the shape, dtype, strides and gradient of the call; what is a view of an argument stays one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from meshplan import compat
from meshplan.compiler.sketch import Sketch


def given(dtype: torch.dtype = torch.float32, grad: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(3, 5, dtype=dtype, requires_grad=grad), torch.empty(7, 5)


def described(t: torch.Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf


CALLS = {
    "linear": lambda x, w: F.linear(x, w),
    "promoted": lambda x, w: torch.mul(x, 2.0),
    "reduced": lambda x, w: torch.sum(x, 0, keepdim=True),
    "turned": lambda x, w: torch.add(x.t(), 1),  # not contiguous
    "view": lambda x, w: x.view(5, 3),
    "itself": lambda x, w: x.contiguous(),
    "compared": lambda x, w: torch.gt(x, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_stand_in_is_like_the_call(name):
    sketch = Sketch()
    with compat.fake_tensor_mode():
        for dtype, grad in [
            (torch.float32, True),
            (torch.float16, False),
            (torch.float32, True),
            (torch.float16, False),
        ]:
            x, _ = given(dtype, grad)
            w = torch.empty(7, 5, dtype=dtype)
            leaves, structure = compat.flatten(((x, w), {}))
            want = CALLS[name](x, w)
            got = sketch.run(partial(CALLS[name], x, w), CALLS[name], leaves, structure)
            assert described(got) == described(want)
            assert (compat.storage_key(got) == compat.storage_key(x)) == (
                compat.storage_key(want) == compat.storage_key(x)
            )
            assert (got is x) == (want is x)


def test_without_gradients_is_another_call():
    sketch, x = Sketch(), None
    with compat.fake_tensor_mode():
        x, w = given()
        leaves, structure = compat.flatten(((x, w), {}))
        assert sketch.run(partial(F.linear, x, w), F.linear, leaves, structure).requires_grad
        with torch.no_grad():
            assert not sketch.run(partial(F.linear, x, w), F.linear, leaves, structure).requires_grad


def test_what_a_stand_in_is_written_into_takes_it():
    sketch = Sketch()
    with compat.fake_tensor_mode():
        for _ in range(2):
            x, w = given()
            leaves, structure = compat.flatten(((x, w), {}))
            h = sketch.run(partial(F.linear, x, w), F.linear, leaves, structure)
            h.add_(1)  # a leaf that wants a gradient would refuse
            h[:, 0] = 2
            assert h.requires_grad and not h.is_leaf
