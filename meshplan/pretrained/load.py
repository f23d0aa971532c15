"""Loading a safetensors folder into a parallelised model: each rank reads its own pieces of each tensor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.pretrained.files import SafeTensors
from meshplan.pretrained.mapping import Sources, same_kind, sources_of, transformers_model
from meshplan.pretrained.movement import Source, piece
from meshplan.runtime.checkpoint import SLOW, _parts
from meshplan.runtime.extents import boxes_of, local_part
from meshplan.runtime.rollcall import agree
from meshplan.runtime.staging import listed
from meshplan.runtime.state import model_tensors, nearest


@dataclass(frozen=True)
class LoadedPretrained:
    """What `load_pretrained` did on this rank.

    Attributes:
        missing: the model's names that the folder lacks (only with `strict=False`).
        unexpected: what the folder has beside (only with `strict=False`).
        bytes_read: bytes of tensors that this rank read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, timeout: float = 15.0
) -> LoadedPretrained:
    """Load the safetensors in `path` in place into `model`, whatever its layout; every rank calls it.

    A rank reads the pieces of the files that it holds, one tensor at a time; nothing is communicated. Names are
    matched as transformers does it (see `meshplan.pretrained.mapping.sources_of`), also inside of a PEFT wrapper, whose
    adapters stay as they are. Floating dtypes become the model's. Names, shapes and dtypes are checked on all ranks
    before the first value is written.

    Arguments:
        model: parallelised, or on one device; not on meta (`parallelize(..., init=False)` gives storage).
        path: a local folder with `model.safetensors`, or its index and shards; or one such file.
        strict: refuse keys that are missing or unexpected; otherwise they are left alone and returned.
        timeout: seconds to wait for ranks that have not come yet.

    Raises PlanError on every rank: `missing-key`, `unexpected-key`, `shape-mismatch`, `dtype-mismatch`,
    `tied-mismatch`, `weight-conversion`, `quantised-weights`, `unsafe-checkpoint` (pickles), `no-checkpoint`,
    `damaged-checkpoint`, `ranks-missing`, `ranks-disagree`.
    """
    job, error = None, None
    try:
        job = _Job.prepare(model, path, strict)
    except PlanError as e:
        error = e
    # Not by its path: each node may have a copy of its own.
    said = agree("load_pretrained", job and job.files.digest(), error, timeout=timeout)
    if len(said) > 1:
        raise PlanError(
            f"the folders of ranks {listed([str(b.rank) for b in said])} hold other tensors",
            code="ranks-disagree",
            legal="the same weights on every rank",
        )
    assert job is not None
    error = None
    try:
        job.run()
    except PlanError as e:
        error = e
    agree("load_pretrained is done", None, error, timeout=SLOW)
    kept = () if strict else (job.sources.missing, job.sources.unexpected)
    return LoadedPretrained(*(kept or ((), ())), job.files.bytes_read)


@dataclass
class _Job:
    """A checked load: `groups` are the names of each distinct tensor that the folder has."""

    files: SafeTensors
    sources: Sources
    tensors: dict[str, Tensor]
    groups: list[list[str]]
    parts: Any

    @classmethod
    def prepare(cls, model: nn.Module, path: str | os.PathLike[str], strict: bool) -> _Job:
        inner = transformers_model(model)
        if inner is not None:
            refuse_quantised(inner.config)
        files = SafeTensors(path)
        tensors = model_tensors(model)
        sources = sources_of(model, tensors, files.tensors)
        names_of: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names_of.setdefault(id(tensor), []).append(name)
        # One name of a tied weight is enough.
        there = {id(tensors[name]) for name in sources.nodes}
        missing = tuple(name for name in sources.missing if id(tensors[name]) not in there)
        if strict and missing:
            raise PlanError(
                f"{path} lacks {listed([n + nearest(n, sources.unexpected) for n in missing])}",
                code="missing-key",
                legal="the folder of this model, or strict=False to keep what the model has",
            )
        if strict and sources.unexpected:
            raise PlanError(
                f"{path} holds {listed([n + nearest(n, tensors) for n in sources.unexpected])}, which the model does not have",
                code="unexpected-key",
                legal="the folder of this model, or strict=False to leave them",
            )
        for name, node in sources.nodes.items():
            _check(name, node, tensors[name], files)
        sources = Sources(sources.nodes, missing, sources.unexpected, sources.adapters)
        groups = [[n for n in names if n in sources.nodes] for names in names_of.values()]
        return cls(files, sources, tensors, [names for names in groups if names], _parts(model))

    @torch.no_grad()
    def run(self) -> None:
        for first, *others in self.groups:
            tensor = self.tensors[first]
            local = local_part(tensor)
            for box in boxes_of(first, tensor, self.parts.get(first)):
                value = self._piece(first, tensor, box)
                for other in others:
                    if not self._same(first, other) and not torch.equal(value, self._piece(other, tensor, box)):
                        raise PlanError(
                            f"{first} and {other} are one tensor in the model but differ in {self.files.path}",
                            code="tied-mismatch",
                            legal="a model whose configuration does not tie them (tie_word_embeddings=False)",
                        )
                box.of(local).copy_(value)

    def _same(self, a: str, b: str) -> bool:
        one, two = self.sources.nodes[a], self.sources.nodes[b]
        return one is two or (isinstance(one, Source) and isinstance(two, Source) and one.name == two.name)

    def _piece(self, name: str, tensor: Tensor, box: Any) -> Tensor:
        def fetch(stored: str, offset: Any, size: Any) -> Tensor:
            # Cast before it is converted, as transformers does.
            return self.files.read(stored, offset, size).to(tensor.dtype)

        return piece(self.sources.nodes[name], box.offset, box.size, fetch)


def _check(name: str, node: Any, tensor: Tensor, files: SafeTensors) -> None:
    if tuple(node.shape) != tuple(tensor.shape):
        raise PlanError(
            f"{name} is {list(node.shape)} in {files.path}, {list(tensor.shape)} in the model",
            code="shape-mismatch",
            legal="the configuration that lies beside the weights",
        )
    for stored in _stored_in(node):
        dtype = files.tensors[stored].dtype
        if not same_kind(dtype, tensor.dtype):
            raise PlanError(
                f"{stored} is {dtype} in {files.path}, and {name} is {tensor.dtype} in the model",
                code="dtype-mismatch",
                legal="floating dtypes of 16 bits or more on both sides, or the same dtype",
            )


def _stored_in(node: Any) -> list[str]:
    if isinstance(node, Source):
        return [node.name]
    return [
        name
        for leaf in node.leaves
        if hasattr(leaf, "shape") and not isinstance(leaf, Tensor)
        for name in _stored_in(leaf)
    ]


def refuse_quantised(config: Any) -> None:
    """PlanError `quantised-weights` where a transformers configuration says that the weights need unpacking."""
    if getattr(config, "quantization_config", None) is not None:
        raise PlanError(
            "the configuration says that the weights are quantised, and this loader does not unpack them",
            code="quantised-weights",
            legal="weights in float32, bfloat16 or float16",
        )
