"""How a tensor of the model is made of stored ones, learnt by watching the conversion; and reading a piece of it.

A conversion (stack the experts, join gate and up) is run once on meta tensors. What it did is kept as a graph, and a
rank's piece of the result is followed back through it: of `cat` and `stack`, slices and transpositions only the
stored elements of that piece are read. Any other operation reads its inputs whole, and the piece is cut from its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan import compat

aten = torch.ops.aten
Extent = Sequence[int]
Fetch = Callable[[str, Extent, Extent], Tensor]  # (stored name, offset, size) -> that piece


class NotRecorded(Exception):
    """The conversion did what a graph cannot hold: it wrote into a tensor, or read values."""


@dataclass(frozen=True, eq=False)
class Source:
    """A stored tensor, whole."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Made:
    """Result number `which` of an operation on `leaves`, in which tensors are nodes."""

    func: Any
    leaves: tuple[Any, ...]
    structure: Any
    which: int
    shape: tuple[int, ...]

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return compat.unflatten(list(self.leaves), self.structure)


Node = Source | Made


class Recording(TorchDispatchMode):
    """Records what happens to the meta tensors that `source` hands out; `node` tells how a tensor was made."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # ids are those of living tensors

    def source(self, name: str, shape: Extent, dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._keep(made, Source(name, tuple(shape)))
        return made

    def node(self, tensor: Tensor) -> Node:
        """Raises NotRecorded for a tensor that was not made of sources."""
        found = self._nodes.get(id(tensor))
        if found is None:
            raise NotRecorded("a result that no recorded operation made")
        return found

    def _keep(self, tensor: Tensor, node: Node) -> None:
        self._alive.append(tensor)
        self._nodes[id(tensor)] = node

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable or func is aten.as_strided.default:
            raise NotRecorded(f"{func} writes into a tensor, or depends on its strides")
        out = func(*args, **kwargs)
        given, structure = compat.flatten((args, kwargs))
        leaves = tuple(self._nodes.get(id(x), x) if isinstance(x, Tensor) else x for x in given)
        many = out if isinstance(out, (list, tuple)) else [out]
        for which, one in enumerate(many):
            if isinstance(one, Tensor):
                self._keep(one, Made(func, leaves, structure, which, tuple(one.shape)))
        return out


def piece(node: Node, offset: Extent, size: Extent, fetch: Fetch) -> Tensor:
    """The part of `node` of extent `size` at `offset`, read through `fetch`."""
    if isinstance(node, Source):
        return fetch(node.name, offset, size)
    rule = _RULES.get(node.func)
    found = rule(node, list(offset), list(size), fetch) if rule else None
    return _computed(node, offset, size, fetch) if found is None else found


def _computed(node: Made, offset: Extent, size: Extent, fetch: Fetch) -> Tensor:
    """The piece cut from the operation's result on whole inputs."""
    leaves = [piece(x, [0] * len(x.shape), x.shape, fetch) if isinstance(x, (Source, Made)) else x for x in node.leaves]
    args, kwargs = compat.unflatten(leaves, node.structure)
    # The strides of a piece are its own.
    func = torch.reshape if node.func in (aten.view.default, aten._unsafe_view.default) else node.func
    out = func(*args, **kwargs)
    out = out[node.which] if isinstance(out, (list, tuple)) else out
    for dim, (first, length) in enumerate(zip(offset, size, strict=True)):
        out = out.narrow(dim, first, length)
    return out


Rule = Callable[[Made, list[int], list[int], Fetch], Tensor | None]


def _same(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor:
    return piece(node.call[0][0], offset, size, fetch)


def _cat(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor | None:
    parts, dim = node.call[0][0], _argument(node, 1, "dim", 0) % len(offset)
    if any(len(part.shape) != len(offset) for part in parts):  # torch passes over empty lists of numbers here
        return None
    found, first = [], 0
    for part in parts:
        low = max(offset[dim], first)
        high = min(offset[dim] + size[dim], first + part.shape[dim])
        if low < high:
            found.append(piece(part, _with(offset, dim, low - first), _with(size, dim, high - low), fetch))
        first += part.shape[dim]
    return torch.cat(found, dim) if found else None


def _stack(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor | None:
    parts, dim = node.call[0][0], _argument(node, 1, "dim", 0) % len(offset)
    inner = [n for i, n in enumerate(offset) if i != dim], [n for i, n in enumerate(size) if i != dim]
    found = [piece(part, *inner, fetch) for part in parts[offset[dim] : offset[dim] + size[dim]]]
    return torch.stack(found, dim) if found else None


def _split(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor:
    whole, sections = node.call[0][0], node.call[0][1]
    dim = _argument(node, 2, "dim", 0) % len(offset)
    before = sections * node.which if isinstance(sections, int) else sum(sections[: node.which])
    return piece(whole, _with(offset, dim, offset[dim] + before), size, fetch)


def _slice(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor | None:
    whole, dim = node.call[0][0], _argument(node, 1, "dim", 0) % len(offset)
    if _argument(node, 4, "step", 1) != 1:
        return None
    start = _argument(node, 2, "start", None) or 0
    start = max(start + whole.shape[dim], 0) if start < 0 else start
    return piece(whole, _with(offset, dim, offset[dim] + start), size, fetch)


def _select(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor:
    whole, dim = node.call[0][0], _argument(node, 1, "dim", 0) % (len(offset) + 1)
    index = node.call[0][2] if node.func is aten.select.int else node.which
    at = [*offset[:dim], index % whole.shape[dim], *offset[dim:]]
    return piece(whole, at, [*size[:dim], 1, *size[dim:]], fetch).squeeze(dim)


def _permute(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor:
    whole = node.call[0][0]
    order = list(range(len(offset)))
    if node.func is aten.permute.default:
        order = [d % len(order) for d in node.call[0][1]]
    elif len(order) > 1:
        a, b = node.call[0][1:3] if node.func is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]
    back = [order.index(i) for i in range(len(order))]
    return piece(whole, [offset[i] for i in back], [size[i] for i in back], fetch).permute(order)


def _squeeze(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor | None:
    whole, dim = node.call[0][:2]
    if not isinstance(dim, int):
        return None
    dim %= len(whole.shape)
    if whole.shape[dim] != 1:
        return piece(whole, offset, size, fetch)
    return piece(whole, [*offset[:dim], 0, *offset[dim:]], [*size[:dim], 1, *size[dim:]], fetch).squeeze(dim)


def _unsqueeze(node: Made, offset: list[int], size: list[int], fetch: Fetch) -> Tensor | None:
    whole, dim = node.call[0][:2]
    dim %= len(offset)
    if size[dim] == 0:
        return None
    return piece(whole, offset[:dim] + offset[dim + 1 :], size[:dim] + size[dim + 1 :], fetch).unsqueeze(dim)


def _with(values: list[int], dim: int, value: int) -> list[int]:
    return [*values[:dim], value, *values[dim + 1 :]]


def _argument(node: Made, position: int, name: str, default: Any) -> Any:
    args, kwargs = node.call
    return args[position] if position < len(args) else kwargs.get(name, default)


_RULES: dict[Any, Rule] = {
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _select,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.squeeze.dim: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
}
