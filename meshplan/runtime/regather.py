"""Gathered sequences that backward gathers again: between forward and backward only this rank's shard is kept.

forward   x [S] --all_gather--> whole --q, k, v-->   autograd would keep `whole` for the weights' gradients
kept      x [S]                                        what is packed is a handle with the shard
backward  x [S] --all_gather--> whole                once a boundary, at its first use; dropped after the last
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshplan import compat
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.module import Around


class _Again:
    """One gathered tensor: its shard, and how many saved tensors stand for it."""

    def __init__(self, shard: Tensor, dtype: torch.dtype, gather: Callable[[Tensor], Tensor]) -> None:
        self.shard, self.dtype, self.gather = shard.detach(), dtype, gather
        self.uses = self.left = 0
        self.whole: Tensor | None = None

    def take(self) -> Tensor:
        """The whole tensor, gathered at the first use of a backward and given back after the last."""
        whole = self.whole
        if whole is None:
            with torch.no_grad():
                whole = self.gather(self.shard)
            if not compat.in_backward():  # someone looks at a saved tensor
                return whole
            self.whole, self.left = whole, self.uses
            # A backward that does not reach every use must not keep the tensor either.
            compat.on_backward_end(self._drop)
        self.left -= 1
        if self.left == 0:
            self._drop()
        return whole

    def _drop(self) -> None:
        self.whole = None


class Keeping(torch.autograd.graph.saved_tensors_hooks):
    """While a module runs: saved tensors that are, or are views of, what its boundaries gathered are kept as shards."""

    running: ClassVar[list[Keeping]] = []

    def __init__(self) -> None:
        super().__init__(_pack, _unpack)
        self.gathered: dict[int, tuple[Tensor, _Again]] = {}

    def __enter__(self) -> None:
        Keeping.running.append(self)
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        Keeping.running.pop()


def _pack(t: Tensor) -> Any:
    if not t.numel():  # a rank's empty part of it may share its memory where the parts of others do not
        return t
    key = compat.storage_key(t)
    for keeping in reversed(Keeping.running):
        found = keeping.gathered.get(key)
        if found is not None and found[1].dtype == t.dtype:
            again = found[1]
            again.uses += 1
            return again, tuple(t.shape), t.stride(), t.storage_offset()
    return t


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    again, shape, stride, offset = kept
    # The collective lays its result out as it did in forward, so the same view of it is the tensor that was saved.
    return again.take().as_strided(shape, stride, offset)  # type: ignore[no-any-return]


def gathering_again(
    convert: Callable[[Tensor], Tensor], group: AxisGroup, dim: int, size: int
) -> Callable[[Tensor], Tensor]:
    """`convert`, a move from shards to the whole at a module's input, noted with the innermost `Keeping`."""

    def run(x: Tensor) -> Tensor:
        whole = convert(x)
        if Keeping.running and whole is not x:
            again = _Again(x, whole.dtype, lambda shard: group.all_gather(shard, dim, size))
            # The whole tensor is held until the module returns: no other may take its address meanwhile.
            Keeping.running[-1].gathered[compat.storage_key(whole)] = (whole, again)
        return whole

    return run


def keeping_shards(around: Around | None) -> Around:
    """What runs a module whose boundaries gather again, around `around` if there is one."""

    def run_around(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Keeping():
            return run(*args, **kwargs) if around is None else around(run, args, kwargs)

    return run_around
