"""Fake tensors and torch modes: the private parts that tracing needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def fake_tensor_mode() -> torch.utils._python_dispatch.TorchDispatchMode:
    """A FakeTensorMode that accepts the model's stray real constants. Private: `torch._subclasses`; if it moves, nothing
    can be lowered."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Do not log shape errors of fake tensors: for calls that are tried and may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when asked for a value (`.item()`, `bool(t)`) or for a shape that depends on values."""
    from torch._subclasses import fake_tensor

    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return tuple(getattr(fake_tensor, name) for name in names)


def is_fake(t: torch.Tensor) -> bool:
    """Whether `t` is a FakeTensor: shape and dtype without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def without_fake_mode() -> Any:
    """A context in which new tensors are real although a FakeTensorMode is on."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def without_function_modes() -> Any:
    """A context in which no TorchFunctionMode sees a call (`torch._C.DisableTorchFunction`, torch 2.11 to 2.13)."""
    return torch._C.DisableTorchFunction()


def current_function_mode() -> Any:
    """The innermost TorchFunctionMode that is on, or None (private in torch 2.11 to 2.13)."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode()


def on_cpu() -> AbstractContextManager[Any]:
    """New tensors are on the CPU whatever the caller's default is. Nothing where they are anyway: a device context sees
    every access to a tensor's attributes, which is a tenth of the time of a lowering."""
    return torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()


@contextmanager
def no_device_context() -> Iterator[None]:
    """Put aside the default-device contexts (`with torch.device(...)`) of the caller: a new one goes to the bottom of the
    stack of function modes, so that those would win over it. Private: the mode stack and `DeviceContext`."""
    from torch.utils._device import DeviceContext

    held: list[Any] = []
    while torch._C._len_torch_function_stack():
        held.append(torch._C._pop_torch_function_stack())
    for mode in reversed(held):
        if not isinstance(mode, DeviceContext):
            torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in reversed(held):
            torch._C._push_on_torch_function_stack(mode)


def fake_like(t: torch.Tensor) -> torch.Tensor:
    """A new FakeTensor with the shape, strides, dtype and device of the fake `t`, without a gradient; it makes no call that a
    mode could see. Private: the constructor of FakeTensor (torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    with without_fake_mode():
        bare = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return FakeTensor(t.fake_mode, bare, t.device)  # type: ignore[attr-defined]
