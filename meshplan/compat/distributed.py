"""Process groups, meshes and DTensor: private or moving parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed.tensor import DTensor

from meshplan.compat.autograd import below_autograd
from meshplan.compat.fake import without_fake_mode


def process_group_of(handle: object) -> object:
    """The `torch.distributed.ProcessGroup` behind what an operator was given: a registered name, a boxed script
    object (`c10d::*`) or the group itself (functional collectives since 2.13). Same on torch 2.11 to 2.13."""
    from torch.distributed import ProcessGroup, distributed_c10d

    if isinstance(handle, str):
        return distributed_c10d._resolve_process_group(handle)  # type: ignore[arg-type]
    if isinstance(handle, torch.ScriptObject):
        return ProcessGroup.unbox(handle)
    return handle


def clear_mesh_caches() -> None:
    """Forget what DTensor remembers about device meshes.

    Equal meshes compare equal although their process groups differ, so after the default group was destroyed and made
    again a cached sharding would lead to a group that no longer exists. Missing caches (by version) are passed over.
    """
    from torch.distributed.tensor import _redistribute, debug

    for owner, name in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
    ):
        clear = getattr(owner, name, None)
        if clear is not None:
            clear()


def default_store() -> Store:
    """The key-value store behind the default process group (private in torch 2.11 to 2.13); raises ValueError without
    a process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# Objects a module may hold that are shared, never copied.
UNCOPYABLE: tuple[type, ...] = ()


if torch.distributed.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    UNCOPYABLE = (ProcessGroup, DeviceMesh)


@contextmanager
def quiet_redistribution() -> Iterator[None]:
    """Do not log that DTensor gathers axis by axis where parameters are sharded twice: for whole values that are looked
    at once, outside any step (the logger's name is private; torch 2.11 to 2.13)."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def root_mesh(mesh: torch.distributed.device_mesh.DeviceMesh) -> torch.distributed.device_mesh.DeviceMesh:
    """The mesh that `mesh` was sliced, flattened or unflattened from, or itself (private in torch 2.11 to 2.13)."""
    return mesh._get_root_mesh()


def flatten_mesh(mesh: torch.distributed.device_mesh.DeviceMesh, name: str) -> torch.distributed.device_mesh.DeviceMesh:
    """A 1-D mesh over all ranks of `mesh`, called `name`, of the same root (`DeviceMesh._flatten`, torch 2.11 to 2.13).

    Makes process groups the first time, so all ranks call it; a second call with equal arguments returns the first."""
    return mesh._flatten(name)


def concatenate_meshes(
    meshes: list[torch.distributed.device_mesh.DeviceMesh],
) -> torch.distributed.device_mesh.DeviceMesh:
    """One mesh with the dims of `meshes` in turn, which have one root; makes no process group
    (`DeviceMesh._concatenate`, torch 2.11 to 2.13)."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(meshes)


def strided_shard_class() -> Any:
    """DTensor's placement of a dim that is cut into pieces first and each piece sharded (private `_StridedShard`, torch 2.11
    to 2.13)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def functional_collectives() -> tuple[Any, Any, Any, Any, Any]:
    """The operators all_gather, reduce_scatter, all_reduce, all_to_all and wait under the functional collectives, overload
    already picked (`torch.ops._c10d_functional`, torch 2.11 to 2.13): `(x, n, group)`, `(x, op, n, group)`, `(x, op, group)`,
    `(x, sizes out, sizes in, group)`, `(x)`."""
    ops = torch.ops._c10d_functional
    return (
        ops.all_gather_into_tensor.default,
        ops.reduce_scatter_tensor.default,
        ops.all_reduce.default,
        ops.all_to_all_single.default,
        ops.wait_tensor.default,
    )


def exchange(group: str, sent: torch.Tensor, to: int, came: torch.Tensor, source: int) -> list[Any]:
    """Start sending one tensor and receiving another over the process group registered as `group`, peers by their rank in
    it; returns what to wait for. NCCL makes both one call, on a stream of its own. Same on torch 2.11 to 2.13, but
    that a registered name leads to its group is private."""
    from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

    members: Any = process_group_of(group)
    ops = [P2POp(isend, sent, group=members, group_peer=to), P2POp(irecv, came, group=members, group_peer=source)]
    with below_autograd():
        return batch_isend_irecv(ops)  # type: ignore[no-any-return]


def new_dtensor(local: torch.Tensor, spec: Any) -> Any:
    """A DTensor of `local` laid out as `spec` (a `DTensorSpec`), without gradient. Unlike a call of the class it skips
    an `__init__` that does nothing, behind a dynamo guard that does something (torch 2.11 to 2.13)."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def full_tensor(x: Any) -> torch.Tensor:
    """`x.full_tensor()` of a DTensor, without gradient. torch 2.11 takes every `_StridedShard` for an order of mesh axes, and
    refuses one beside a `Shard` of another dim; it is told there that pieces of a dim are meant
    (private `DTensorSpec.use_strided_shard_as_shard_order`, torch 2.11 to 2.13)."""
    try:
        return x.full_tensor()  # type: ignore[no-any-return]
    except ValueError as error:
        if "use_strided_shard_as_shard_order" not in str(error):
            raise
        spec = dataclasses.replace(x._spec, use_strided_shard_as_shard_order=False)
        return new_dtensor(x.to_local().detach(), spec).full_tensor()  # type: ignore[no-any-return]


def is_strided_shard(placement: Any) -> bool:
    """Whether a DTensor placement is the private `_StridedShard`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def implicit_replication(on: bool) -> None:
    """Let DTensor calls of this thread take plain tensors as replicated, as
    `torch.distributed.tensor.experimental.implicit_replication` does inside its block (torch 2.11 to 2.13)."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._allow_implicit_replication = on


def fake_store() -> Store:
    """The store of a fake process group (`torch.testing._internal`, torch 2.11 to 2.13)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def real_strided_offsets() -> Iterator[None]:
    """Under a FakeTensorMode, let `_StridedShard` compute its offsets with real tensors: it calls `.tolist()` on them
    (torch 2.13; where the method is missing nothing is done)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    own = getattr(_StridedShard, "local_shard_size_and_offset", None)
    if own is None:
        yield
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_fake_mode():
            return own(*args, **kwargs)

    _StridedShard.local_shard_size_and_offset = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        _StridedShard.local_shard_size_and_offset = own  # type: ignore[method-assign]
