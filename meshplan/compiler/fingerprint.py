"""A digest of the single device's program, by which ranks find out that their Python ran the model in another order.

What a rank's plan does to a program is numbered by module and call. Code that iterates over a set of strings takes an order
that each process draws for itself (PYTHONHASHSEED): the numbers may agree where what stands behind them does not.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.compiler.capture import Ref, Trace

_ELEMENTS = 16
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, slice, type(Ellipsis))


def fingerprint(trace: Trace) -> str:
    """Equal for traces that make the same calls in the same order, of the same values with the same constants.

    Objects other than numbers, text, dtypes and slices count by their type: they show addresses or this rank's device.
    """
    digest = hashlib.sha256()
    for call in trace.calls:
        leaves = tuple(_leaf(x) for x in call.leaves)
        digest.update(repr((call.name, call.module, call.ordinal, leaves, call.outs)).encode())
    made = {value for call in trace.calls for value in call.outs} | set(trace.given)
    for value in sorted({value for call in trace.calls for value in call.ins} - made):
        digest.update(repr((value, _constant(trace.values[value]))).encode())
    return digest.hexdigest()[:16]


def _leaf(x: Any) -> Any:
    if isinstance(x, Ref):
        return ("value", x.value)
    return x if isinstance(x, _PLAIN) else type(x).__name__


def _constant(t: Tensor) -> Any:
    """Shape, dtype and some elements of a tensor that no call makes; parameters have no elements while traced."""
    if compat.is_fake(t) or t.is_meta or not t.numel():
        return tuple(t.shape), t.dtype
    return tuple(t.shape), t.dtype, some_of(t).tolist()


def some_of(t: Tensor) -> Tensor:
    """Up to 16 elements of `t`, evenly spaced, flat; none of an empty one."""
    return t.detach().reshape(-1)[:: -(-t.numel() // _ELEMENTS) or 1]
