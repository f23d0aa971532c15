"""The ring over peers' memory with all its ranks in one process, on one device: what one GPU can show of it.

Each logical rank has its own windows, flags and landing places. They take turns, so that none waits for what comes after it on
the stream: all publish, then each pulls and computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan.kernels.attention.peer_ring import Memory, SymmetricRing, region_size
from meshplan.ops.attention.block import State
from meshplan.ops.attention.message import pack, unpack
from meshplan.ops.precision import wide

Parts = Callable[[int, int], Iterator[tuple[slice, slice, Any]]]
"""(rank, source) -> the rows, keys and span of what `rank` sees of the keys of `source`."""


def logical_rings(ranks: int, window: int, device: torch.device) -> list[SymmetricRing]:
    """A ring for each of `ranks`, for messages of up to `window` bytes (a multiple of 16)."""
    regions = [torch.zeros(region_size(window, ranks), dtype=torch.uint8, device=device) for _ in range(ranks)]
    pointers = [region.data_ptr() for region in regions]
    return [SymmetricRing(Memory(rank, region, pointers, window)) for rank, region in enumerate(regions)]


def attention(given: Sequence[Any], block: Any, parts: Parts) -> Iterator[tuple[Tensor, ...]]:
    """(out, lse, dq, dk, dv) of every logical rank, the gradients in float32 (float64).

    Arguments:
        given: the ranks' shards (q, k, v, dout).
        block: what computes a block.
    """
    first, key, value, _ = given[0]
    shapes, scale, dtype = (key.shape, value.shape), first.shape[-1] ** -0.5, wide(first.dtype)
    messages = [pack(k, v) for _, k, v, _ in given]
    size = messages[0].numel() * dtype.itemsize
    rings = logical_rings(len(given), -(-size // 16) * 16, messages[0].device)

    def shared() -> list[Iterator[tuple[int, Tensor]]]:
        return [ring.share(message) for ring, message in zip(rings, messages, strict=True)]  # published, nothing pulled

    results = []
    for rank, arrivals in enumerate(shared()):
        q, _, v, _ = given[rank]
        state = block.new_state(q, v)
        for source, message in arrivals:
            k, v = unpack(message, *shapes)
            for rows, keys, span in parts(rank, source):
                seen = State(*(x[:, :, rows] for x in state))
                block.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], span, scale, seen)
        results.append(block.finish(state, q.dtype))
    dqs, gradients = [], []
    for rank, arrivals in enumerate(shared()):
        (q, _, _, dout), (out, lse) = given[rank], results[rank]
        delta, dq = block.delta(out, dout), torch.zeros_like(q, dtype=dtype)
        found: dict[int, Tensor] = {}
        for source, message in arrivals:
            (k, v), found[source] = unpack(message, *shapes), torch.zeros_like(message, dtype=dtype)
            dk, dv = unpack(found[source], *shapes)
            for rows, keys, span in parts(rank, source):
                facts = (x[:, :, rows] for x in (dout, lse, delta))
                sums = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
                block.backward(q[:, :, rows], k[:, :, keys], v[:, :, keys], *facts, span, scale, *sums)
        dqs.append(dq)
        gradients.append([found[source] for source in range(len(given))])
    *_, totals = zip(*(ring.collecting(own) for ring, own in zip(rings, gradients, strict=True)), strict=True)
    for (out, lse), dq, total in zip(results, dqs, totals, strict=True):
        yield out, lse, dq, *unpack(total, *shapes)
