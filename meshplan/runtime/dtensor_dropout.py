"""Dropout inside DTensor regions: our own streams, so that masks are those of one device on every mesh.

DTensor on a CPU mesh draws the same bits for every shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshplan.ops.dropout import DropoutStreams, dropout
from meshplan.ops.dropout_attention import scaled_dot_product_attention
from meshplan.runtime.comm import chunk_offset, chunk_sizes


def drop(args: Any, kwargs: Any, streams: DropoutStreams | None, path: str) -> Tensor:
    """`F.dropout` of a DTensor without partial sums: each rank masks its own block by global index."""
    given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    x, p, training = given["input"], given.get("p", 0.5), given.get("training", True)
    if not training or p == 0.0:
        return x  # type: ignore[no-any-return]
    key = streams.key(path) if streams is not None else 0
    local = dropout(x.to_local(), p, True, key=key, global_shape=x.shape, offsets=offsets(x, x.shape))
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def drop_attention(given: Mapping[str, Any], streams: DropoutStreams | None, path: str) -> Tensor:
    """Attention with dropout, of a query, key and value sharded alike by batch or heads; the mask likewise or plain."""
    q, k, v = (given[n] for n in ("query", "key", "value"))
    shape = torch.Size((*q.shape[:-1], k.shape[-2]))
    stream = streams.key(path) if streams is not None else 0
    rest: dict[str, Any] = {n: x for n, x in given.items() if n not in ("query", "key", "value")}
    mask = rest.get("attn_mask")
    if mask is not None:
        whole = mask.full_tensor() if isinstance(mask, DTensor) else mask
        rest["attn_mask"] = _own(whole.expand(shape), q)
    local = scaled_dot_product_attention(
        q.to_local(), k.to_local(), v.to_local(), **rest, stream=stream, global_shape=shape, offsets=offsets(q, shape)
    )
    out = torch.empty((*q.shape[:-1], v.shape[-1]), device="meta")
    return DTensor.from_local(
        local.contiguous(), q.device_mesh, q.placements, run_check=False, shape=out.shape, stride=out.stride()
    )


def offsets(x: DTensor, shape: Any) -> list[int]:
    """First global index of this rank's block on each dim of a tensor of global `shape` placed as `x`."""
    out, _ = _block(x, shape)
    return out


def _own(whole: Tensor, x: DTensor) -> Tensor:
    for dim, (start, length) in enumerate(zip(*_block(x, whole.shape), strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def _block(x: DTensor, shape: Any) -> tuple[list[int], list[int]]:
    """Offsets and sizes; inner mesh dims split what outer ones left."""
    starts, sizes = [0] * len(shape), list(shape)
    at = x.device_mesh.get_coordinate() or [0] * x.device_mesh.ndim
    for i, p in enumerate(x.placements):
        if isinstance(p, Shard):
            n = x.device_mesh.size(i)
            starts[p.dim] += chunk_offset(sizes[p.dim], n, at[i])
            sizes[p.dim] = chunk_sizes(sizes[p.dim], n)[at[i]]
    return starts, sizes
