"""Which modules of experts one trial answers for."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

PLAIN = (int, float, bool, str, type(None), torch.dtype)

Kind = tuple[tuple[type, ...], str]


def kind_of(module: nn.Module) -> Kind:
    """Equal for modules that one trial answers for: classes, plain attributes, functions and buffers, inside too, and shapes of
    parameters."""
    made = [
        (name, [(key, v if type(v) in PLAIN else _code(v)) for key, v in sorted(m.__dict__.items())
                if type(v) in PLAIN or hasattr(v, "__qualname__")])
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


def _code(function: Any) -> tuple[Any, ...]:
    """What tells a function from others: two of one name may be made at different times."""
    code = getattr(function, "__code__", None)
    return function.__qualname__, code and (code.co_filename, code.co_firstlineno, code.co_code)
