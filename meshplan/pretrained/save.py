"""Saving a parallelised transformers model as one device would: full tensors in safetensors, written by rank 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.pretrained.mapping import transformers_model
from meshplan.runtime.checkpoint import SLOW, _parts
from meshplan.runtime.extents import Box, boxes_of, local_part
from meshplan.runtime.rollcall import agree, world_size
from meshplan.runtime.state import model_tensors


def save_pretrained(model: nn.Module, path: str | os.PathLike[str], *, timeout: float = 15.0, **options: Any) -> None:
    """Write the folder that `save_pretrained` of the same model on one device writes; every rank calls it.

    Tensors travel to rank 0 one by one, whatever their layout, and rank 0 holds all of them in host memory while it
    writes (for a model too large for that, `mp.save` writes sharded). A PEFT wrapper writes its adapters only.

    Arguments:
        timeout: seconds to wait for ranks that have not come yet.
        options: of transformers' or PEFT's `save_pretrained`, such as `max_shard_size`.

    Raises PlanError on every rank: `bad-model` for what is no transformers model, `ranks-missing`, `shard-extent`,
    `checkpoint-write`.
    """
    held, error = None, None
    first = world_size() == 1 or dist.get_rank() == 0
    try:
        if transformers_model(model) is None:
            raise PlanError(
                f"a {type(model).__name__} is no transformers model",
                code="bad-model",
                legal="mp.save, which saves any model",
            )
        held = model_tensors(model)
        parts = _parts(model)
        boxes = {name: boxes_of(name, t, parts.get(name)) for name, t in held.items()}
    except PlanError as e:
        error = e
    agree("save_pretrained", None, error, timeout=timeout)
    assert held is not None
    full = _gathered(held, boxes)
    error = None
    try:
        if first:
            _write(model, Path(path), full, options)
    except (OSError, ValueError, RuntimeError) as e:
        error = PlanError(f"{path}: {e}", code="checkpoint-write")
    agree("save_pretrained is done", None, error, timeout=SLOW)


def _write(model: nn.Module, path: Path, full: dict[str, Tensor], options: dict[str, Any]) -> None:
    save: Any = getattr(type(model), "save_pretrained")  # noqa: B009  of its class: the instance's may be refused
    save(model, str(path), state_dict=full, **options)


def _gathered(held: dict[str, Tensor], boxes: dict[str, list[Box]]) -> dict[str, Tensor]:
    """On rank 0 every tensor whole, on the CPU, tied ones as one object; elsewhere nothing."""
    world = world_size()
    rank = dist.get_rank() if world > 1 else 0
    everyone: list[Any] = [boxes]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, boxes)
    out: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    for name, tensor in held.items():
        if id(tensor) in done:
            if rank == 0:
                out[name] = done[id(tensor)]
            continue
        local = local_part(tensor)
        full = torch.empty(tensor.shape, dtype=tensor.dtype) if rank == 0 else torch.empty(0)
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for owner in range(world):
            for box in everyone[owner][name]:
                if (box.offset, box.size) in seen:  # copies
                    continue
                seen.add((box.offset, box.size))
                if rank == owner == 0:
                    _into(full, box).copy_(box.of(local))
                elif rank == owner:
                    dist.send(box.of(local).contiguous(), dst=0)
                elif rank == 0:
                    arrived = torch.empty(box.size, dtype=tensor.dtype, device=local.device)
                    dist.recv(arrived, src=owner)
                    _into(full, box).copy_(arrived)
        done[id(tensor)] = full
        if rank == 0:
            out[name] = full
    return out


def _into(full: Tensor, box: Box) -> Tensor:
    for dim, (first, length) in enumerate(zip(box.offset, box.size, strict=True)):
        full = full.narrow(dim, first, length)
    return full
