"""Which ranks hold different elements of one logical parameter, and which hold copies: what a global norm must know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.runtime.comm import AxisGroup

STAGE_AXIS = "pp"
"""The mesh axis whose ranks hold different parameters, rather than parts of one."""

_ATTRIBUTE = "_meshplan_ownership"


@dataclass(frozen=True)
class Ownership:
    """How the copies and pieces of one parameter's gradient lie on the ranks, seen from one of them.

    Attributes:
        split: groups whose ranks hold different elements. On all other axes ranks hold copies.
        partial: groups whose ranks hold summands of the gradient.
        stages: the pipeline group, whose ranks hold other parameters; None without a pipeline.
        counted: False for a copy that another rank counts, beyond what groups can say: a weight tied between the first
            and the last pipeline stage is counted on one of them.
        device_type: where the groups can communicate ("cuda" also for parameters offloaded to the CPU); None if there
            is nothing to communicate.
    """

    split: tuple[AxisGroup, ...] = ()
    partial: tuple[AxisGroup, ...] = ()
    stages: AxisGroup | None = None
    counted: bool = True
    device_type: str | None = None


def declare(parameter: Tensor, ownership: Ownership) -> None:
    """Say how a parameter lies on the ranks where its type cannot: a plain tensor that is a shard, a plain parameter of
    a pipeline stage, a tied copy on another stage. Holds for this tensor object."""
    setattr(parameter, _ATTRIBUTE, ownership)


def ownerships(parameters: Iterable[Tensor]) -> list[Ownership]:
    """The ownership of each parameter: as declared; else from the layout of its gradient, or its own, if a DTensor;
    else a plain tensor, of which every rank holds a copy.

    A DTensor's mesh may be any slice or flattening of a larger one: on the axes that it leaves out, ranks hold copies,
    except on `pp`, which is the pipeline.

    Raises:
        PlanError: `rank-outside-mesh` for a DTensor on a mesh without this rank (its norm could not be known here);
            `partial-gradient` for a gradient that is partial other than as a sum.
    """
    # Per call, not for good: equal meshes may have process groups that are gone (see compat.clear_mesh_caches).
    known: dict[tuple[int, tuple[object, ...]], Ownership] = {}
    found = []
    for parameter in parameters:
        declared = getattr(parameter, _ATTRIBUTE, None)
        laid_out = next((t for t in (parameter.grad, parameter) if isinstance(t, DTensor)), None)
        if declared is not None or laid_out is None:
            found.append(declared or Ownership())
            continue
        key = (id(laid_out.device_mesh), tuple(laid_out.placements))
        if key not in known:
            known[key] = _from_layout(laid_out)
        found.append(known[key])
    return found


def _from_layout(tensor: DTensor) -> Ownership:
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise PlanError(
            f"a parameter of shape {list(tensor.shape)} lies on a mesh that does not contain this rank",
            code="rank-outside-mesh",
            legal="parameters whose mesh contains every rank that passes them",
        )
    split, partial = [], []
    for index, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(index) == 1:
            continue
        if placement.is_partial():
            if placement.reduce_op != "sum":  # type: ignore[attr-defined]
                raise PlanError(
                    f"a gradient of shape {list(tensor.shape)} is {placement} on {_axis(mesh, index)}",
                    code="partial-gradient",
                    legal="gradients that are sharded, replicated, or partial sums",
                )
            partial.append(_group(mesh, index))
        else:
            split.append(_group(mesh, index))
    root = compat.root_mesh(mesh)
    names = root.mesh_dim_names or ()
    stages = None
    if STAGE_AXIS in names and root.size(names.index(STAGE_AXIS)) > 1:
        stages = _group(root, names.index(STAGE_AXIS))
    return Ownership(tuple(split), tuple(partial), stages, device_type=mesh.device_type)


def _axis(mesh: DeviceMesh, index: int) -> str:
    return mesh.mesh_dim_names[index] if mesh.mesh_dim_names else str(index)


def _group(mesh: DeviceMesh, index: int) -> AxisGroup:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    name = mesh.get_group(index).group_name
    return AxisGroup(_axis(mesh, index), mesh.size(index), coordinate[index], name)
