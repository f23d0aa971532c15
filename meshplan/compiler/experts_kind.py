"""Which modules of experts one trial answers for."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from meshplan.ops.experts.block import Block
from meshplan.ops.experts.call import Routed

PLAIN = (int, float, bool, str, type(None), torch.dtype)

Kind = tuple[tuple[type, ...], str]


def kind_of(module: nn.Module) -> Kind:
    """Equal for modules that one trial answers for: classes, attributes, functions and buffers, inside too, and shapes of
    parameters."""
    made = [
        (name, [(key, _said(v)) for key, v in sorted(m.__dict__.items()) if key not in _OWN])
        for name, m in module.named_modules()
    ]  # fmt: skip
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    held = hashlib.sha256(repr((made, shapes)).encode())
    for name, b in module.named_buffers():
        held.update(repr((name, tuple(b.shape), b.dtype, b.is_meta)).encode())
        if not b.is_meta:
            held.update(b.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return tuple(type(m) for m in module.modules()), held.hexdigest()


def alike(module: nn.Module) -> Kind:
    """Equal for modules of the same classes and shapes of parameters, which their numbers alone may tell apart."""
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    return tuple(type(m) for m in module.modules()), repr(shapes)


_OWN = frozenset(nn.Module().__dict__)
"""What every module has."""

_alive: dict[int, Any] = {}
"""Objects that only their address tells from others, kept so that no other gets it."""


def _said(value: Any) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, (Routed, Block)):
        return "the module's own code"  # called as one operator, while experts are lowered
    if hasattr(value, "__qualname__"):
        return _code(value)
    text = repr(vars(value)) if hasattr(value, "__dict__") else repr(value)
    if " at 0x" in text:
        _alive[id(value)] = value
    return type(value).__qualname__, text


def _code(function: Any) -> tuple[Any, ...]:
    """What tells a function from others: two of one name may be made at different times."""
    code = getattr(function, "__code__", None)
    return function.__qualname__, code and (code.co_filename, code.co_firstlineno, code.co_code)
