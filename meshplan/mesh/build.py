"""Process groups and device meshes of a spec: made once, by every rank in one order, then only looked up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.mesh.agree import agree
from meshplan.mesh.binding import check_launch, claim_device, device_id
from meshplan.mesh.spec import ALIASES, MeshSpec
from meshplan.runtime.comm import AxisGroup, OnCall


@dataclass(frozen=True)
class Groups:
    """The groups one rank is in, by axes. This class is abstract groups: sizes and positions, nothing to send on.

    Attributes:
        spec: the mesh.
        rank: whose view this is.
        on_call: told of each collective (see `AxisGroup`).
    """

    spec: MeshSpec
    rank: int
    on_call: OnCall | None = field(default=None, compare=False)

    def group(self, *axes: str) -> AxisGroup:
        """The group over `axes` flattened in mesh order. Axes of one rank vanish: dp_shard + cp without cp is dp_shard.

        Its `axis` is what is left, joined by `+`, with the sub-axes of a split axis under their parent's name where
        all of them are there.
        """
        axes = expand(axes)
        busy = busy_axes(self.spec, axes)
        size = self.spec.degree(*axes)
        name = self._name(busy) if busy else None
        label = group_label(self.spec, busy) if busy else "+".join(axes)
        return AxisGroup(label, size, self.spec.coord(self.rank, *axes), name, self.on_call)

    def alone(self) -> AxisGroup:
        """This rank by itself."""
        return AxisGroup("none", 1, 0)

    def _name(self, busy: tuple[str, ...]) -> str | None:
        return None


@dataclass(frozen=True)
class BuiltMesh(Groups):
    """Groups that exist: an `AxisGroup` carries the process group's registered name.

    Attributes:
        mesh: the device mesh, one named dim an axis, axes of one rank too.
        flat: 1-D device meshes of flattened axes, by the axes of more than one rank that they flatten.
    """

    mesh: DeviceMesh = field(kw_only=True)
    flat: Mapping[tuple[str, ...], DeviceMesh] = field(kw_only=True, compare=False)

    def mesh_of(self, *dims: str | tuple[str, ...]) -> DeviceMesh:
        """A device mesh with one dim for each of `dims`; a tuple is flattened to one dim.

        `mesh_of(("dp_shard", "cp"))` is what `fully_shard` takes for sharding over both, and
        `mesh_of("dp_replicate", ("dp_shard", "cp"))` for HSDP. All such meshes have one root, as DTensor needs.
        """
        parts = [self._dim(expand((dim,) if isinstance(dim, str) else dim)) for dim in dims]
        return parts[0] if len(parts) == 1 else compat.concatenate_meshes(parts)

    def _dim(self, axes: tuple[str, ...]) -> DeviceMesh:
        busy = busy_axes(self.spec, axes)
        if busy:
            return self._built(busy)
        names = self.mesh.mesh_dim_names or ()
        have = [leaf for axis in axes for leaf in self.spec.leaves(axis) or (axis,) if leaf in names]
        if not have:
            raise _not_built(axes, self)
        return self.mesh[have[0]]

    def _name(self, busy: tuple[str, ...]) -> str | None:
        return self._built(busy).get_group().group_name

    def _built(self, busy: tuple[str, ...]) -> DeviceMesh:
        if len(busy) == 1:
            return self.mesh[busy[0]]
        if busy not in self.flat:
            raise _not_built(busy, self)
        return self.flat[busy]


def abstract_groups(spec: MeshSpec, rank: int, on_call: OnCall | None = None) -> Groups:
    """The groups of `rank` without a process group: for compiling, on any world size."""
    return Groups(spec, rank, on_call)


def build_groups(
    spec: MeshSpec, device_type: str, axes_sets: Iterable[tuple[str, ...]] = (), timeout_s: float = 60
) -> BuiltMesh:
    """Make the process groups of every axis, and of each of `axes_sets` flattened, on the default process group.

    Every rank calls this with equal arguments: each makes every group, in one order, whether it is a member or not.
    That they do is agreed on through the store first. Groups made for an equal spec before are used again.

    Arguments:
        spec: the mesh; its world is the default process group's, of any backend.
        device_type: `cpu` or `cuda`.
        axes_sets: axes that will be asked for together. An axis the spec does not have becomes one of degree 1, so that
            `mesh_of` can answer.
        timeout_s: seconds to wait for the slowest rank.

    Raises PlanError: `no-process-group`; `mesh-size` when the spec does not fill the group; `world-size` when the
    launcher's world is another; `device-shared` on a rank whose CUDA device another rank has; on the other ranks then
    `rank-failed`; `ranks-differ` and `rank-missing` as `agree`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            "there is no process group to build a mesh on",
            code="no-process-group",
            legal="torch.distributed.init_process_group() first, under torchrun",
        )
    sets = [expand(axes) for axes in axes_sets]
    if dist.get_backend() == "fake":
        # A fake group stands for a world that nobody launched: no other rank to agree with.
        _check_size(spec)
    else:
        _agree_to_build(spec, device_type, sets, timeout_s)
    known = set(spec.names) | {parent for _, parent in spec.parents}
    absent = dict.fromkeys(axis for axes in sets for axis in axes if axis not in known)
    sizes = (*((axis, 1) for axis in absent), *spec.axes) or (("dp_shard", 1),)
    root = _root(sizes, device_type)
    flat = {}
    for axes in sets:
        busy = busy_axes(spec, axes)
        if len(busy) > 1:
            flat[busy] = compat.flatten_mesh(root[busy], group_label(spec, busy))
    return BuiltMesh(spec, dist.get_rank(), mesh=root, flat=flat)


def _agree_to_build(spec: MeshSpec, device_type: str, sets: list[tuple[str, ...]], timeout_s: float) -> None:
    """Raise on every rank unless all are about to make the same groups on devices of their own."""
    store, rank, world = compat.default_store(), dist.get_rank(), dist.get_world_size()
    mine = None
    try:
        check_launch(world)
        _check_size(spec)
        claim_device(store, rank, device_id(device_type))
    except PlanError as error:
        mine = error
    facts = {"mesh": str(spec), "device": device_type, "groups": ", ".join("+".join(axes) for axes in sets)}
    try:
        agree(
            store,
            rank,
            world,
            program_hash=hashlib.sha256(repr((spec, facts)).encode()).hexdigest(),
            facts=facts,
            error=None if mine is None else str(mine),
            tag="mesh",
            timeout_s=timeout_s,
        )
    except PlanError as verdict:
        if mine is not None:
            # A rank that failed says what it knows best; the verdict is for the others.
            raise mine from verdict
        raise


def _check_size(spec: MeshSpec) -> None:
    world = dist.get_world_size()
    if spec.world_size != world:
        raise PlanError(
            f"mesh {spec} is {spec.world_size} ranks, and the process group has {world}",
            code="mesh-size",
            legal=f"degrees that multiply to {world}",
        )


def expand(axes: Iterable[str]) -> tuple[str, ...]:
    """`axes` with aliases written out (`dp` is dp_replicate and dp_shard), each once."""
    return tuple(dict.fromkeys(name for axis in axes for name in ALIASES.get(axis, (axis,))))


def busy_axes(spec: MeshSpec, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes of more than one rank that `axes` stand for, in mesh order."""
    return tuple(axis for axis in spec.leaves(*axes) if spec.degree(axis) > 1)


def group_label(spec: MeshSpec, busy: tuple[str, ...]) -> str:
    """The name of a group over `busy`: joined by `+`, sub-axes under their parent's name once all busy ones are in."""
    names = list(busy)
    for parent in dict.fromkeys(parent for _, parent in reversed(spec.parents)):
        parts = busy_axes(spec, (parent,))
        if parts and set(parts) <= set(busy):
            names = [parent if name in parts else name for name in names]
    return "+".join(dict.fromkeys(names))


_roots: dict[tuple[Any, ...], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def forget() -> None:
    """Drop the meshes kept for groups that were destroyed; while they are kept, the threads of their groups go on."""
    _roots.clear()


def _root(sizes: tuple[tuple[str, int], ...], device_type: str) -> DeviceMesh:
    """The device mesh of all axes, kept as long as the default process group it was made on is the current one."""
    world = dist.group.WORLD
    assert world is not None
    kept = _roots.get((sizes, device_type))
    if kept is None or kept[0] is not world:
        kept = (world, _make_root(sizes, device_type))
        _roots[sizes, device_type] = kept
    return kept[1]


def _make_root(sizes: tuple[tuple[str, int], ...], device_type: str) -> DeviceMesh:
    names, degrees = zip(*sizes, strict=True)
    busy = [(name, degree) for name, degree in sizes if degree > 1]
    if len(busy) == len(sizes):
        return init_device_mesh(device_type, degrees, mesh_dim_names=names)
    # One group of this rank alone serves all axes of degree 1. Left to the mesh, each such axis would be a group a rank
    # that all ranks make. A group with no other member needs no agreed order.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups: dict[str, dist.ProcessGroup] = {}
    if busy:
        inner = init_device_mesh(device_type, tuple(d for _, d in busy), mesh_dim_names=tuple(n for n, _ in busy))
        groups = {name: inner.get_group(name) for name, _ in busy}
    ranks = torch.arange(dist.get_world_size(), dtype=torch.int, device="cpu").view(degrees)
    return DeviceMesh.from_group([groups.get(name, alone) for name in names], device_type, ranks, mesh_dim_names=names)


def _not_built(axes: tuple[str, ...], built: BuiltMesh) -> LookupError:
    have = [*(built.mesh.mesh_dim_names or ()), *("+".join(axes) for axes in built.flat)]
    return LookupError(
        f"no group over {'+'.join(axes)} was built: name it in axes_sets, so that every rank makes it in one order; "
        f"there are {', '.join(have)}"
    )
