"""Arguments that cannot be seen into: an object that holds tensors, or gathers some while the model runs."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from meshplan.errors import PlanError

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})


def refuse_state(key: str, x: Any) -> None:
    """PlanError `argument-state` where `x`, given as `key`, carries tensors whose layout nobody knows: a key/value cache,
    which a call fills with this rank's heads, or any other object with a tensor in it."""
    if type(x) in _PLAIN:
        return
    kind = _cache_class()
    if kind is not None and isinstance(x, kind):
        raise PlanError(
            f"{key} is a {type(x).__name__}: a call leaves this rank's heads in it, and its length is another program at "
            "every token",
            code="argument-state",
            legal="use_cache=False, as in model.generate(..., use_cache=False)",
        )
    if _holds_tensor(x, 4):
        raise PlanError(
            f"{key} is a {type(x).__name__} with tensors in it, whose layout cannot be known",
            code="argument-state",
            legal="tensors, and lists, tuples and dicts of them",
        )


def _cache_class() -> type | None:
    """transformers' base class of caches; None while nobody has imported it."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


def _holds_tensor(x: Any, depth: int) -> bool:
    if isinstance(x, Tensor):
        return True
    if depth == 0 or type(x) in _PLAIN or isinstance(x, type) or callable(x):
        return False
    if isinstance(x, (list, tuple, set, frozenset)):
        return any(_holds_tensor(one, depth - 1) for one in x)
    held = x if isinstance(x, dict) else getattr(x, "__dict__", {})
    return any(_holds_tensor(one, depth - 1) for one in held.values())
