"""What a call's arguments must be on one rank: sizes written in the user's code become this rank's sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshplan import compat

SIZED = {"view", "reshape", "expand", "broadcast_to", "_unsafe_view"}
CREATED = {"zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"}


def local_leaves(
    name: str, leaves: list[Any], structure: Any, outs: list[tuple[int, ...]], split_dim_sizes: list[int] | None
) -> list[Any]:
    """The single-device call's non-tensor leaves with sizes replaced by this rank's.

    Arguments:
        leaves: flattened arguments of the single-device call (tensors as anything that is not an int).
        outs: this rank's shape of each output.
        split_dim_sizes: this rank's extent of each output along the split dim, for split-like calls.
    """
    args, kwargs = compat.unflatten(list(leaves), structure)
    if name in SIZED | CREATED:
        start = 1 if name in SIZED or name.startswith("new_") else 0
        sizes = list(outs[0])
        if name == "full" or name == "new_full":
            args = (*args[:start], sizes, *args[start + 1 :])
        else:
            count = sum(1 for a in args[start:] if isinstance(a, (int, list, tuple, torch.Size)))
            args = (*args[:start], sizes, *args[start + count :])
            for key in ("size", "shape"):
                if key in kwargs:
                    args, kwargs = args[:start], {**kwargs, key: sizes}
    elif name == "unflatten":
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        count = len(args[2] if len(args) > 2 else kwargs["sizes"])
        dim %= len(outs[0]) - count + 1
        sizes = list(outs[0][dim : dim + count])
        args, kwargs = (args[0], dim, sizes), {}
    elif name in ("split", "split_with_sizes", "tensor_split") and split_dim_sizes is not None:
        named = [k for k in ("split_size", "split_size_or_sections", "split_sizes") if k in kwargs]
        sizes = split_dim_sizes
        if named:
            kwargs = {**kwargs, named[0]: sizes}
        else:
            args = (args[0], sizes, *args[2:])
    return [args, kwargs]


def same_constant(a: Any, b: Any) -> bool:
    """Whether two non-tensor arguments mean the same."""
    if isinstance(a, torch.device) and isinstance(b, torch.device):
        return a.type == b.type
    if type(a) is not type(b) and not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        return False
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return a is b


def same_index(index_a: Any, shape_a: tuple[int, ...], index_b: Any, shape_b: tuple[int, ...]) -> bool:
    """Whether two subscripts select alike: equal, or slices that each take the whole of their dim."""
    a = index_a if isinstance(index_a, tuple) else (index_a,)
    b = index_b if isinstance(index_b, tuple) else (index_b,)
    if len(a) != len(b):
        return False
    used = sum(1 for i in a if i is not None and i is not Ellipsis)
    dim = 0
    for x, y in zip(a, b, strict=True):
        if x is Ellipsis:
            if y is not Ellipsis:
                return False
            dim += len(shape_a) - used
            continue
        if isinstance(x, slice) and isinstance(y, slice):
            whole = x.indices(shape_a[dim]) == (0, shape_a[dim], 1) and y.indices(shape_b[dim]) == (0, shape_b[dim], 1)
            if not (whole or x == y):
                return False
        elif isinstance(x, Tensor) or isinstance(y, Tensor):
            if isinstance(x, Tensor) != isinstance(y, Tensor):
                return False
            dim += x.dim() - 1 if isinstance(x, Tensor) and x.dtype == torch.bool else 0
        elif not same_constant(x, y):
            return False
        dim += x is not None
    return True
