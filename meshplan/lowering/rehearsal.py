"""One step of a DTensor region on fake tensors: what it will send, and whether DTensor can run it at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.commgraph import Collective
from meshplan.compiler.dtensor_plan import DTensorPlan
from meshplan.compiler.skeleton import fake_copy, fake_world
from meshplan.errors import PlanError
from meshplan.lowering.dtensor import install_regions
from meshplan.mesh.build import BuiltMesh, build_groups, group_label
from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.recorder import record_collectives


def rehearse(model: nn.Module, plan: DTensorPlan, built: BuiltMesh) -> tuple[Collective, ...] | None:
    """The collectives of one training step of `model` (which is not changed) as this rank issues them; None where the
    program reads values, which fake tensors do not have.

    Raises PlanError `dtensor-refused` where DTensor has no way to run it, and what the region itself refuses.
    """
    mesh = built.mesh_of(*plan.dims)  # made of real tensors, hence before there are fake ones
    with fake_world() as mode:
        skeleton = fake_copy(model, mode)
        with mode:
            try:
                install_regions(skeleton, plan, mesh, None)
                names = partial(_axis, plan.core.spec, built.rank)
                with compat.real_strided_offsets(), record_collectives(names) as log:
                    out = skeleton(**_inputs(plan))
                    ends = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor) and x.requires_grad]
                    if ends:
                        torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
            except compat.data_dependent_errors():
                return None
            except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as error:
                said = str(error).partition("\n")[0]
                raise PlanError(
                    f"DTensor cannot run this model: {type(error).__name__}: {said}",
                    code="dtensor-refused", legal="regions: auto, or a forward whose ops DTensor has rules for",
                ) from error  # fmt: skip
            finally:
                compat.implicit_replication(False)
    return tuple(
        Collective(c.phase, c.op, c.axis or "", len(c.ranks), c.dtype, c.elements, "", "", "dtensor", "") for c in log
    )


def _axis(spec: MeshSpec, rank: int, ranks: tuple[int, ...]) -> str | None:
    busy = [name for name, n in spec.axes if n > 1]
    for first in range(len(busy)):
        for last in range(first + 1, len(busy) + 1):
            if spec.group_of(rank, *busy[first:last]) == ranks:
                return group_label(spec, tuple(busy[first:last]))
    return None


def _inputs(plan: DTensorPlan) -> dict[str, Any]:
    made = {}
    spec = plan.core.spec
    for name, example in plan.core.examples.items():
        leaves: list[Any] = []
        for leaf in example.leaves:
            if leaf.shape is None:
                leaves.append(leaf.constant)
                continue
            shape = list(leaf.shape)
            for axes, dim in zip(plan.dims, plan.input(leaf.key, len(shape)), strict=True):
                if dim is not None:
                    shape[dim] //= spec.degree(*axes)
            leaves.append(torch.empty(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad))
        made[name] = compat.unflatten(leaves, example.structure)
    return made


@contextmanager
def stand_in_world(spec: MeshSpec, rank: int, axes_sets: list[tuple[str, ...]]) -> Iterator[BuiltMesh | None]:
    """The mesh of a world nobody launched, on a fake process group that is gone afterwards; None where this process is
    in a world already, whose groups are not to be touched."""
    if dist.is_initialized():
        yield None
        return
    store = compat.fake_store()
    dist.init_process_group("fake", store=store, rank=rank, world_size=spec.world_size)
    try:
        yield build_groups(spec, "cpu", axes_sets)
    finally:
        dist.destroy_process_group()
        compat.clear_mesh_caches()
