"""The only door to torch's private or moving APIs: each function says what it replaces and on which versions it holds."""

from __future__ import annotations

import torch
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]  # re-exported: the base of our modes


def process_group_of(handle: object) -> object:
    """The `torch.distributed.ProcessGroup` behind what an operator was given: a registered name, a boxed script
    object (`c10d::*`) or the group itself (functional collectives since 2.13). Same on torch 2.11 to 2.13."""
    from torch.distributed import ProcessGroup, distributed_c10d

    if isinstance(handle, str):
        return distributed_c10d._resolve_process_group(handle)  # type: ignore[arg-type]
    if isinstance(handle, torch.ScriptObject):
        return ProcessGroup.unbox(handle)
    return handle


def in_backward() -> bool:
    """True while the calling thread runs a node, hook or callback of the autograd engine (torch 2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


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


def default_store() -> torch.distributed.Store:
    """The key-value store behind the default process group (private in torch 2.11 to 2.13); raises ValueError without
    a process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def fake_tensor_mode() -> torch.utils._python_dispatch.TorchDispatchMode:
    """A FakeTensorMode that accepts the model's stray real constants. Private: `torch._subclasses`; if it moves, nothing can be lowered."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of nested lists, tuples, dicts and registered containers. Private: `torch.utils._pytree`."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The inverse of `flatten`."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def flatten_with_path(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their key path as dotted text: `("0", x)`, `("past.1", y)`, `("logits", z)`; a bare leaf has path ""."""
    from torch.utils import _pytree

    def key(k: Any) -> str:
        for attr in ("key", "idx", "name"):
            if hasattr(k, attr):
                return str(getattr(k, attr))
        return str(k)

    return [(".".join(key(k) for k in path), leaf) for path, leaf in _pytree.tree_flatten_with_path(tree)[0]]


# Objects a module may hold that are shared, never copied.
UNCOPYABLE: tuple[type, ...] = ()
if torch.distributed.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    UNCOPYABLE = (ProcessGroup, DeviceMesh)


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when asked for a value (`.item()`, `bool(t)`) or for a shape that depends on values."""
    from torch._subclasses import fake_tensor

    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return tuple(getattr(fake_tensor, name) for name in names)


def storage_key(tensor: object) -> int:
    """A number that two tensors share exactly while they are views of one storage. Unlike `data_ptr()` it also tells
    meta tensors apart. Valid as long as the storage lives (`UntypedStorage._cdata`, torch 2.11 to 2.13)."""
    return tensor.untyped_storage()._cdata  # type: ignore[attr-defined]
