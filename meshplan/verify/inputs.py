"""Makes the global batch of a verification from a plan's inputs: odd values, and unequal label counts per data rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.streams import stream_key
from meshplan.plan.placements import Shard
from meshplan.plan.rules import Input
from meshplan.runtime.comm import chunk_offset, chunk_sizes

IGNORED = -100
"""Label that counts for nothing: the default `ignore_index` of torch's cross entropy."""


def make_batch(inputs: Mapping[str, Input], spec: MeshSpec, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """A global batch for `inputs`; the same for a seed wherever it is made.

    What an integer input means is read off its name: `label` or `target` in it are class ids, of which each data
    rank ignores another share (equal shares would hide a mean of means); `position` counts along the last dim; `mask`
    is all ones, because a mask's meaning is the model's own; what the plan declares as offsets cuts its sequence into unequal
    documents; anything else is token ids. Ids stay below the smallest
    embedding (labels: the last Linear's width) of `model`. Floating inputs are normal, bool ones fair coins.

    Raises PlanError `no-shape` for an input without shape or dtype.
    """
    rows, classes = id_ranges(model)
    batch = {}
    for name, item in inputs.items():
        if item.shape is None or item.dtype is None:
            raise PlanError(
                f"input {name!r} has no {'shape' if item.shape is None else 'dtype'} to make a batch from",
                code="no-shape",
                where=item.source.where,
                legal="shape and dtype in the plan, or inputs= with a global batch",
            )
        generator = torch.Generator().manual_seed(stream_key(seed, "batch", name))
        shape, dtype, lower = item.shape, item.dtype, name.lower()
        if item.offsets is not None:
            batch[name] = _offsets(item, inputs[item.offsets], generator)
        elif dtype.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        elif dtype == torch.bool or "mask" in lower:
            batch[name] = (
                torch.randint(2, shape, generator=generator, dtype=torch.int64).bool()
                if dtype == torch.bool and "mask" not in lower
                else torch.ones(shape, dtype=dtype)
            )
        elif "position" in lower:
            batch[name] = torch.arange(shape[-1], dtype=dtype).expand(shape).clone()
        elif "label" in lower or "target" in lower:
            labels = torch.randint(classes, shape, generator=generator, dtype=dtype)
            batch[name] = ignore_unequally(labels, item, spec, generator)
        else:
            batch[name] = torch.randint(rows, shape, generator=generator, dtype=dtype)
    return batch


def _offsets(item: Input, of: Input, generator: torch.Generator) -> Tensor:
    """Documents of unequal length, of at least one position each while there are enough, that fill the sequence of `of`."""
    assert item.shape is not None and of.shape is not None
    cp = of.place.get("cp")
    size = of.shape[cp.dim if isinstance(cp, Shard) else min(1, len(of.shape) - 1)]
    inner = min(item.shape[0] - 2, size - 1)
    ends = (torch.randperm(size - 1, generator=generator)[:inner] + 1).sort().values
    return torch.cat([torch.tensor([0]), ends, torch.full((item.shape[0] - 1 - inner,), size)]).to(item.dtype)


def id_ranges(model: nn.Module) -> tuple[int, int]:
    """(rows of the smallest embedding, width of the last Linear) of `model`; a missing one is the other, or 2."""
    rows = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    width = next((m.out_features for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), 0)
    return rows or width or 2, min(width or rows, rows or width) or 2


def ignore_unequally(labels: Tensor, item: Input, spec: MeshSpec, generator: torch.Generator) -> Tensor:
    """`labels` with -100 at random places: block `d` of the D that data ranks hold ignores (d + 1) / (2 D + 2) of its
    labels (rounded down, at least d), and at least one stays."""
    cuts = []
    for dim in range(labels.ndim):
        axes = [
            axis for axis, place in item.place.items() if isinstance(place, Shard) and place.dim % labels.ndim == dim
        ]
        n, size = spec.degree(*[a for a in axes if a != "tp"]) if axes else 1, labels.shape[dim]
        cuts.append([(chunk_offset(size, n, i), chunk_sizes(size, n)[i]) for i in range(n)])
    blocks = [block for block in itertools.product(*cuts) if all(length for _, length in block)]
    labels = labels.clone()
    for d, block in enumerate(blocks):
        region = labels[tuple(slice(start, start + length) for start, length in block)]
        size = region.numel()
        ignored = min(size - 1, max(d, size * (d + 1) // (2 * len(blocks) + 2)))
        hidden = torch.zeros(size, dtype=torch.bool)
        hidden[torch.randperm(size, generator=generator)[:ignored]] = True
        region[hidden.view(region.shape)] = IGNORED
    return labels


def small_inputs(inputs: Mapping[str, Input], spec: MeshSpec) -> dict[str, Input]:
    """The plan's integer inputs with batch (dim 0) and sequence (dim 1) cut down, still divided by what divided them.

    A dim of n becomes the smallest size, at least 2 for the batch and 8 for the sequence, that has the same greatest
    common divisor as n with 2 x world and 8 x world. Floating inputs keep their shape: their sizes belong to the model.
    """
    world = spec.world_size
    out: dict[str, Input] = {}
    for name, item in inputs.items():
        if item.shape is not None and item.dtype is not None and not item.dtype.is_floating_point and item.offsets is None:
            shape = tuple(_small(n, (2, 8)[d], world) if d < 2 else n for d, n in enumerate(item.shape))
            item = replace(item, shape=shape)
        out[name] = item
    return out


def _small(n: int, least: int, world: int) -> int:
    common = math.gcd(n, least * world)
    size = common
    while size < min(n, least) or math.gcd(size, least * world) != common:
        size += common
    return size


def describe(batch: Mapping[str, Any]) -> dict[str, str]:
    """The batch as text by name, for example `int64[4, 32]`."""
    return {
        name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)
        for name, x in batch.items()
    }
