"""The DTensor placement of a fused dim (`q|k|v`, `gate|up`) whose parts are each sharded on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.runtime.comm import chunk_offset, chunk_sizes

_Strided: Any = compat.strided_shard_class()


def fused_shard(dim: int, parts: Sequence[int]) -> Any:
    """A placement under which `full_tensor()` and `redistribute` keep the user's order of rows.

    For parts (8, 4, 4) on two ranks:

        rank 0 holds rows 0-3, 8-9, 12-13       rank 1 holds rows 4-7, 10-11, 14-15

    Arguments:
        dim: the fused tensor dim.
        parts: sizes of the parts along it.
    """
    if len(set(parts)) == 1:
        return _Strided(dim, split_factor=len(parts))
    return FusedShard(dim, tuple(parts))


class FusedShard(_Strided):  # type: ignore[misc]
    """`_StridedShard` cuts a dim into equal pieces first; here the pieces are the parts, whatever their sizes.

    All that gathers or cuts goes through `_split_tensor`. It compares equal to the stock placement with as many pieces,
    which is what DTensor's elementwise rules build for results; such a result (a moment made by `zeros_like`) keeps its
    local rows right, but only `meshplan.save`, which knows the parts by name, gathers it in the user's order.
    """

    def __init__(self, dim: int, parts: tuple[int, ...]) -> None:
        super().__init__(dim, split_factor=len(parts))
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedShard, (self.dim, self.parts)

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        pieces = tensor.split(list(self.parts), self.dim)
        shards = [
            torch.cat(
                [
                    piece.narrow(self.dim, chunk_offset(size, num_chunks, i), chunk_sizes(size, num_chunks)[i])
                    for piece, size in zip(pieces, self.parts, strict=True)
                ],
                self.dim,
            )
            for i in range(num_chunks)
        ]
        longest = max(shard.shape[self.dim] for shard in shards)
        return shards, [longest - shard.shape[self.dim] for shard in shards] if with_padding else []
