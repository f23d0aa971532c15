"""Calls of torch's `flex_attention` and `create_block_mask` taken over for a while, however a model came by the functions.

Neither can be seen from outside: they are no torch functions for a mode (only the properties that they read are), and on the CPU
they refuse inputs that want a gradient. Models hold them by name, or wrapped by `torch.compile`; all of these are one function
object each, so its code is what is exchanged, and torch's compiled wrappers run what they wrap while that lasts.

Holds on torch 2.11 to 2.13: both are plain Python functions of `torch.nn.attention.flex_attention` without a closure.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

Takers = Mapping[str, Callable[..., Any]]
"""What to call in place of each function, by its name."""

_MODULE = "torch.nn.attention.flex_attention"
_lock = threading.Lock()
_held: dict[str, CodeType] = {}  # torch's own code while it is exchanged
_open = 0
_eager: Any = None  # what puts torch's stance back
_within = 0


class _Here(threading.local):
    takers: tuple[Takers, ...] = ()


_here = _Here()


@contextmanager
def taking_flex(takers: Takers) -> Iterator[None]:
    """Calls that this thread makes of `flex_attention` and `create_block_mask` go to `takers`; other threads' are torch's own.
    Nothing happens where the module of both was never imported."""
    if _MODULE not in sys.modules:
        yield
        return
    with without_compiling():
        _exchange(1)
        _here.takers = (*_here.takers, takers)
        try:
            yield
        finally:
            _here.takers = _here.takers[:-1]
            _exchange(-1)


def flex_takers() -> Takers | None:
    """Those of the innermost `taking_flex` of this thread."""
    return _here.takers[-1] if _here.takers else None


def own_flex(*args: Any, **kwargs: Any) -> Any:
    """torch's own `flex_attention`, whoever takes it at the moment."""
    return _own("flex_attention")(*args, **kwargs)


def lacks_flex_backward(error: BaseException) -> bool:
    """Whether `error` is torch's refusal of inputs that want a gradient: on the CPU flex_attention has no backward."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, NotImplementedError) and any(
        frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_name == "_validate_device" for frame, _ in frames
    )


@contextmanager
def without_compiling() -> Iterator[None]:
    """What `torch.compile` wrapped runs as it is, in all threads, until the last of them has left such a block: torch has one
    stance, and whoever leaves puts back what it found."""
    global _eager, _within
    if "torch._dynamo" not in sys.modules:  # then nothing was wrapped, and to import it takes a second
        yield
        return
    with _lock:
        _within += 1
        if _within == 1:
            _eager = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                _eager.__exit__(None, None, None)


def _exchange(step: int) -> None:
    global _open
    module = sys.modules[_MODULE]
    with _lock:
        _open += step
        for name, code in _TAKING.items():
            function = getattr(module, name)
            if step > 0 and _open == 1:
                _held[name], function.__code__ = function.__code__, code
            elif _open == 0:
                function.__code__ = _held.pop(name)


def _called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _here.takers:
        return _here.takers[-1][name](*args, **kwargs)
    return _own(name)(*args, **kwargs)


def _own(name: str) -> FunctionType:
    function = getattr(sys.modules[_MODULE], name)
    own = FunctionType(_held.get(name, function.__code__), function.__globals__, name, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


# Their code runs with the names of torch's module around it, hence the imports.
def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    from meshplan.compat import flex

    return flex._called("flex_attention", args, kwargs)


def _create_block_mask(*args: Any, **kwargs: Any) -> Any:
    from meshplan.compat import flex

    return flex._called("create_block_mask", args, kwargs)


_TAKING = {"flex_attention": _flex_attention.__code__, "create_block_mask": _create_block_mask.__code__}
