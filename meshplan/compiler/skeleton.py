"""A copy of the user's model on fake tensors: same Python objects' behaviour, no storage, nothing of the user's touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshplan import compat

ShapeOf = Callable[[str, Tensor], tuple[int, ...]]


def fake_copy(model: nn.Module, mode: torch.utils._python_dispatch.TorchDispatchMode, shape_of: ShapeOf | None = None) -> nn.Module:
    """Deep copy of `model` whose parameters and buffers are fake tensors (device cpu, no storage).

    Arguments:
        mode: the FakeTensorMode the copies belong to.
        shape_of: shape of each parameter or buffer by canonical name; None keeps the global shapes.

    Ties and shared modules survive, since the copy maps each tensor once. Hooks are copied, process groups are shared.
    """
    memo: dict[int, object] = {}
    with mode:
        for name, p in model.named_parameters():
            shape = shape_of(name, p) if shape_of else tuple(p.shape)
            fake = torch.empty(shape, dtype=p.dtype, device="cpu")
            memo[id(p)] = nn.Parameter(fake, requires_grad=p.requires_grad)
        for name, b in model.named_buffers():
            shape = shape_of(name, b) if shape_of else tuple(b.shape)
            memo[id(b)] = torch.empty(shape, dtype=b.dtype, device="cpu")
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, (torch.Generator, *compat.UNCOPYABLE)):
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


@contextmanager
def fake_world() -> Iterator[torch.utils._python_dispatch.TorchDispatchMode]:
    """A FakeTensorMode in which the model's stray real constants are accepted, and the random state is put back."""
    state = torch.random.get_rng_state()
    try:
        yield compat.fake_tensor_mode()
    finally:
        torch.random.set_rng_state(state)
