"""One load of a checkpoint as three steps: prepare and validate, read beside the model, commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from meshplan.errors import PlanError
from meshplan.runtime import dcp
from meshplan.runtime.dcp import Piece
from meshplan.runtime.extents import Parts, boxes_of, local_part
from meshplan.runtime.restore_optimizer import OptimizerRestore
from meshplan.runtime.staging import beside, listed, stage
from meshplan.runtime.state import decode, model_tensors, nearest


@dataclass(frozen=True)
class Loaded:
    """What `load` found beside the tensors.

    Attributes:
        extra: what `save` was given as `extra`, its tensors on the CPU.
        plan: YAML text of the plan it was saved under, or None.
        missing: keys that the model has and the checkpoint lacks (only with `strict=False`).
        unexpected: keys that the checkpoint has and no rank's model does (only with `strict=False`).
    """

    extra: Any
    plan: str | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Restore:
    """A validated load. `prepare` looks, `read` fills staging memory on the host, `commit` alone changes anything.

    Attributes:
        tensors: the model's live tensors by user name.
        staged: host memory for this rank's part of each key that it takes.
        reads: what to read from which file.
        optimizer: the optimizer's half of the work, or None.
        missing: names in the model that the checkpoint lacks.
    """

    reader: dcp.Reader
    metadata: Metadata
    side: Mapping[str, Any] | None
    tensors: dict[str, Tensor]
    staged: dict[str, Piece]
    reads: LoadPlan
    optimizer: OptimizerRestore | None
    missing: tuple[str, ...]

    @classmethod
    def prepare(
        cls,
        folder: Path,
        side: Mapping[str, Any] | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parts: Mapping[str, Parts],
        strict: bool,
    ) -> Restore:
        """Check everything that this rank can check alone; raises PlanError as `load` says. Changes nothing."""
        reader = dcp.Reader(folder)
        metadata = reader.read_metadata()
        saved = dcp.tensors_in(metadata)
        tensors = model_tensors(model)
        missing = [name for name in tensors if name not in saved]
        if missing and strict:
            raise PlanError(
                f"the checkpoint {folder} lacks {listed([n + nearest(n, saved) for n in missing])}",
                code="missing-key",
                legal="the model that was saved, or strict=False",
            )
        staged = {
            name: stage(name, tensor, saved[name], boxes_of(name, tensor, parts.get(name)))
            for name, tensor in tensors.items()
            if name in saved
        }
        staged.update({key: beside(entry) for key, entry in saved.items() if key.startswith("extra/")})
        half = None
        if optimizer is not None:
            groups = side["groups"] if side is not None else None
            if groups is None or side is None:
                raise PlanError(f"the checkpoint {folder} holds no optimizer state", code="no-optimizer")
            half = OptimizerRestore.prepare(optimizer, tensors, saved, groups, side["scalars"], parts, strict)
            staged.update(half.staged)
        reads = dcp.plan_reads(reader, metadata, staged)
        return cls(reader, metadata, side, tensors, staged, reads, half, tuple(missing))

    @property
    def keys(self) -> list[str]:
        """The checkpoint's keys that this rank takes."""
        return sorted(self.staged)

    def unexpected(self, taken: set[str], strict: bool) -> tuple[str, ...]:
        """Saved keys that no rank takes, those of an optimizer aside if none is loaded; PlanError if `strict`."""
        left = sorted(set(self.metadata.state_dict_metadata) - taken)
        if self.optimizer is None:
            left = [key for key in left if not key.startswith("optimizer/")]
        if left and strict:
            raise PlanError(
                f"the checkpoint {self.reader.path} holds {listed([k + nearest(k, self.tensors) for k in left])}, "
                "which the model does not have",
                code="unexpected-key",
                legal="the model that was saved, or strict=False",
            )
        return tuple(left)

    def read(self) -> None:
        """Fill the staging memory, and check what only values can tell."""
        dcp.read(self.reader, self.metadata, self.reads, self.staged)
        first: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            if name not in self.staged:
                continue
            other = first.setdefault(id(tensor), name)
            if other != name and not _same_bits(self.staged[other].local, self.staged[name].local):
                raise PlanError(
                    f"{other} and {name} are one tensor in the model but differ in the checkpoint",
                    code="tied-mismatch",
                    legal="a checkpoint of a model that ties them too",
                )

    def extra(self) -> Any:
        """What was saved as `extra`, after `read`."""
        tree = self.side["extra"] if self.side is not None else None
        return decode(tree, lambda key: self.staged[key].local)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the staged values into the model and the optimizer."""
        for name, tensor in self.tensors.items():
            if name in self.staged:
                local_part(tensor).copy_(self.staged[name].local)
        if self.optimizer is not None:
            self.optimizer.commit()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
