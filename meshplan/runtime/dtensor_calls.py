"""Which torch calls DTensor may run on shards, and on which axes it must not: all others run on replicated values.

DTensor's rules are not an oracle (cumulative sums over a sharded dim, mean losses with unequal ignored labels and some
gradients come out wrong without a word). Only calls whose rule is elementwise, a matrix product, a movement of elements
off the sharded dim, or one of the few named here keep their shards; for any other call all arguments are replicated
first, which is exact whatever the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from meshplan import compat


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words(
    """
    add sub rsub radd mul rmul div rdiv truediv rtruediv true_divide neg pow rpow exp log sqrt rsqrt reciprocal square
    sin cos tanh sigmoid relu gelu silu softplus mish hardswish leaky_relu elu celu selu abs clamp where masked_fill
    to float double half bfloat16 long int bool type type_as clone contiguous detach eq ne lt le gt ge logical_and
    logical_or logical_not and or xor invert maximum minimum erf requires_grad zeros_like ones_like
    """
)
PRODUCTS = _words("linear matmul rmatmul mm bmm addmm embedding")
MOVES = _words("view reshape transpose permute unsqueeze squeeze flatten unflatten t T mT expand movedim")
ALONG = {  # calls that act along one dim: where that dim stands among the arguments, and its default
    "softmax": (1, -1), "log_softmax": (1, -1), "chunk": (2, 0), "split": (2, 0), "split_with_sizes": (2, 0),
    "cat": (1, 0), "concat": (1, 0), "narrow": (1, 0), "select": (1, 0), "unbind": (1, 0),
}  # fmt: skip
NORMS = frozenset(("layer_norm", "rms_norm"))
ASKS = _words(
    """
    size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex element_size __len__ __hash__
    get_device data_ptr storage_offset __format__ __repr__ is_same_size register_hook retain_grad
    """
)
GETTERS = frozenset(("T", "mT", "H", "mH"))  # attributes that are tensors


def plain_name(func: Callable[..., Any]) -> str:
    """A function's name without underscores at its ends; of an attribute, the attribute's."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
    return name.strip("_") or name


def only_asks(func: Callable[..., Any]) -> bool:
    """Whether a call asks about a tensor and computes nothing."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in GETTERS  # type: ignore[attr-defined]
    return name in ASKS


def blocked_dims(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The dims (counted from the end, as -1, -2...) that no axis may shard while call `name` runs; None for all."""
    if name in ELEMENTWISE or name in PRODUCTS or name in MOVES:
        return ()
    if name in ALONG:
        at, default = ALONG[name]
        x: Any = args[0] if args else kwargs.get("input", kwargs.get("tensors"))
        ndim = (x[0] if isinstance(x, (list, tuple)) else x).dim()
        dim = args[at] if len(args) > at else kwargs.get("dim", default)
        return (dim % ndim - ndim,) if isinstance(dim, int) else None
    if name in NORMS:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return tuple(-1 - i for i in range(len(shape) if isinstance(shape, Sequence) else 1))
    if name == "getitem":
        return _indexed(args[0], args[1])
    if name == "scaled_dot_product_attention":
        return (-1, -2)
    return None


def _indexed(x: Any, index: Any) -> tuple[int, ...] | None:
    """Dims that a subscript cuts. None where it is more than slices, integers and new dims."""
    items = index if isinstance(index, tuple) else (index,)
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    cut, dim = [], 0
    for item in items:
        if item is None:
            continue
        if item is Ellipsis:
            dim += x.dim() - used
            continue
        if isinstance(item, slice):
            if item.indices(x.shape[dim]) != (0, x.shape[dim], 1):
                cut.append(dim - x.dim())
        elif isinstance(item, int) and not isinstance(item, bool):
            cut.append(dim - x.dim())
        else:
            return None
        dim += 1
    return tuple(cut)


def shards_blocked(x: DTensor, dims: tuple[int, ...] | None) -> list[int]:
    """The mesh dims on which `x` must be replicated: those that shard one of `dims`, or shard at all for None."""
    return [i for i, p in enumerate(x.placements) if p.is_partial() or _blocked(p, x.dim(), dims)]


def _blocked(placement: Any, ndim: int, dims: tuple[int, ...] | None) -> bool:
    if compat.is_strided_shard(placement):
        return True
    return placement.is_shard() and (dims is None or placement.dim - ndim in dims)
