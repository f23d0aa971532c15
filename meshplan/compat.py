"""The only door to torch's private or moving APIs: each function says what it replaces and on which versions it holds."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed.tensor import DTensor
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


def in_checkpoint() -> bool:
    """True inside a function that `torch.utils.checkpoint` will run again in backward, the non-reentrant way (its hooks on
    saved tensors are the innermost ones; private in torch 2.11 to 2.13)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


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


def fake_tensor_mode() -> torch.utils._python_dispatch.TorchDispatchMode:
    """A FakeTensorMode that accepts the model's stray real constants. Private: `torch._subclasses`; if it moves, nothing
    can be lowered."""
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


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Do not log shape errors of fake tensors: for calls that are tried and may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


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


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when asked for a value (`.item()`, `bool(t)`) or for a shape that depends on values."""
    from torch._subclasses import fake_tensor

    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return tuple(getattr(fake_tensor, name) for name in names)


def storage_key(tensor: object) -> int:
    """A number that two tensors share exactly while they are views of one storage. Unlike `data_ptr()` it also tells
    meta tensors apart. Valid as long as the storage lives (`UntypedStorage._cdata`, torch 2.11 to 2.13)."""
    return tensor.untyped_storage()._cdata  # type: ignore[attr-defined]


def assert_on_device(condition: torch.Tensor) -> None:
    """Queue an assertion on the condition's device, without a wait: as torch's own index checks on CUDA do. Replaces
    `torch._assert_async` (torch 2.11 to 2.13)."""
    torch._assert_async(condition)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The `order`-norm of each tensor, accumulated and returned in `dtype`, in a few kernels; tensors share device and
    dtype. Replaces `torch._foreach_norm` (its `dtype` argument: torch 2.11 to 2.13)."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by the 0-dim `factor`, in place, in a few kernels. Replaces `torch._foreach_mul_`."""
    torch._foreach_mul_(tensors, factor)


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


def fsdp_group(module: Any) -> Any:
    """FSDP2's parameter group of `module` (its `FSDPParamGroup`), or None: not a unit, or a unit without parameters.
    One name in torch 2.11, a property over a list in 2.13."""
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def fsdp_forward_mark(root: Any) -> int:
    """How many unit forwards FSDP2 remembers, waiting for their backward."""
    return len(root._get_fsdp_state()._comm_ctx.post_forward_order)


def fsdp_forget_forwards(root: Any, groups: list[Any], mark: int) -> None:
    """Forget unit forwards remembered since `fsdp_forward_mark` gave `mark`. FSDP2 also remembers forwards that have no
    backward, and then prefetches for them in the next one."""
    del root._get_fsdp_state()._comm_ctx.post_forward_order[mark:]
    for group in groups:
        group._post_forward_indices = [i for i in group._post_forward_indices if i < mark]


def on_backward_end(callback: Any) -> None:
    """Run `callback()` when the backward that is running now is over; later callbacks run after earlier ones. Called
    inside a hook or node of the autograd engine."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def fsdp_was_gathered(group: Any) -> bool:
    """Whether the parameters of `group` have been gathered at least once, which is when FSDP2 makes the whole ones."""
    return all(hasattr(p, "_unsharded_param") for p in group.fsdp_params)


def fsdp_gradients(group: Any) -> list[Any]:
    """The `FSDPParam`s of `group` that hold a whole gradient now: this backward's, or one kept from earlier ones."""
    return [
        p for p in group.fsdp_params if p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None
    ]


def fsdp_upcast_gradients(group: Any) -> None:
    """Give all gradients that `group` is about to reduce the reduce dtype, if gradients kept from earlier microbatches
    have it: FSDP2 keeps those in the reduce dtype and asserts that all agree (pytorch#196996)."""
    having = fsdp_gradients(group)
    if any(p.unsharded_accumulated_grad is not None for p in having):
        for p in having:
            if p.unsharded_accumulated_grad is None:
                p.to_accumulated_grad_if_needed()


def fsdp_align_partial(group: Any, packed: list[Any], now: list[Any]) -> list[Any]:
    """Make gradients that come `now` and the sum over earlier microbatches, in which `packed` lie, cover the same
    parameters: a missing gradient becomes zeros, a missing part of the sum too. Returns what both cover then.

    On a hybrid mesh FSDP2 adds flat buffers across microbatches without looking at what lies in them
    (`FSDPParamGroup._partial_reduce_output`)."""
    union = [p for p in group.fsdp_params if p in packed or p in now]
    for p in union:
        if p not in now:
            p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
    if len(union) > len(packed):
        # On the stream that adds to this buffer: order and lifetime are then FSDP2's own.
        with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
            parts = list(group._partial_reduce_output.split([p.padded_sharded_param_size.numel() for p in packed]))
            zeros = group._partial_reduce_output.new_zeros
            group._partial_reduce_output = torch.cat(
                [parts.pop(0) if p in packed else zeros(p.padded_sharded_param_size.numel()) for p in union]
            )
    return union


def fsdp_flush_partial(group: Any) -> None:
    """Reduce once more, after FSDP2 has ended its backward: for a unit whose sum waits while nothing more came."""
    state = group._training_state
    group.post_backward()
    group._training_state = state
    group.finalize_backward()


def fsdp_abandon(root: Any, groups: list[Any]) -> None:
    """After an exception: wait for what is in flight, free gathered parameters and forget unreduced gradients.
    `FSDPModule.reset_iter_state` does most of it from 2.13 on, but leaves gradients of unreduced microbatches."""
    state = root._get_fsdp_state()
    if state._is_root and hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    elif state._is_root:
        context = state._state_ctx
        idle = type(state._training_state).IDLE
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        state._comm_ctx.post_forward_order.clear()
        for each in context.all_states:
            each._training_state = idle
        for group in groups:
            group._training_state = idle
            group.finalize_backward()
            group._partial_reduce_output = None
            group._to_sharded()
    for group in groups:
        for p in group.fsdp_params:
            p.unsharded_accumulated_grad = None
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.grad = None


def unshared(grads: tuple[torch.Tensor, ...]) -> bool:
    """Whether nobody else holds `grads[0]`, the first gradient that a Function's `backward(ctx, *grads)` was given: then
    it may be kept as it is, the rule of torch's AccumulateGrad. (`_use_count` is private; torch without it says no.)"""
    count = getattr(grads[0], "_use_count", None)
    return count is not None and count() == 1 and sys.getrefcount(grads[0]) <= _references()


@functools.cache
def _references() -> int:
    """References that the interpreter and autograd themselves hold to such a gradient: measured, since it is theirs to change."""
    seen: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            _count(grads, seen)

    def _count(grads: tuple[torch.Tensor, ...], seen: list[int]) -> None:
        seen.append(sys.getrefcount(grads[0]))  # from a call, as in `unshared`

    with torch.enable_grad():
        (Probe.apply(torch.ones(2, requires_grad=True)) * 1.0).sum().backward()
    return seen[0]


def is_fake(t: torch.Tensor) -> bool:
    """Whether `t` is a FakeTensor: shape and dtype without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def without_fake_mode() -> Any:
    """A context in which new tensors are real although a FakeTensorMode is on."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def without_function_modes() -> Any:
    """A context in which no TorchFunctionMode sees a call (`torch._C.DisableTorchFunction`, torch 2.11 to 2.13)."""
    return torch._C.DisableTorchFunction()


def current_function_mode() -> Any:
    """The innermost TorchFunctionMode that is on, or None (private in torch 2.11 to 2.13)."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode()


def strided_shard_class() -> Any:
    """DTensor's placement of a dim that is cut into pieces first and each piece sharded (private `_StridedShard`, torch 2.11
    to 2.13)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def functional_collectives() -> tuple[Any, Any, Any, Any]:
    """The operators all_gather, reduce_scatter, all_reduce and wait under the functional collectives, overload already
    picked (`torch.ops._c10d_functional`, torch 2.11 to 2.13): `(x, n, group)`, `(x, op, n, group)`, `(x, op, group)`, `(x)`."""
    ops = torch.ops._c10d_functional
    return (
        ops.all_gather_into_tensor.default,
        ops.reduce_scatter_tensor.default,
        ops.all_reduce.default,
        ops.wait_tensor.default,
    )


below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which operators record nothing for backward and skip that layer of dispatch (torch 2.11 to 2.13)."""


def bare_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its Python layer, which only serves the transforms of `torch.func` (see
    `in_function_transform`) and costs as much as the rest. Torch 2.11 to 2.13: the class beneath `Function`."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


in_function_transform = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` (vmap, grad, jvp) is on (private in torch 2.11 to 2.13)."""


def returns_gradient(p: torch.Tensor) -> bool:
    """In a running backward: whether it is a `torch.autograd.grad` that was asked for the gradient of `p`, a leaf."""
    if not p.requires_grad:
        return False
    # Not `get_gradient_edge`: it takes a view, and a DTensor cut part by part has sizes that no view fits.
    with torch.enable_grad():
        node = torch.ops.aten.alias(p).grad_fn.next_functions[0][0]
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


def accumulates(leaf: Any) -> bool:
    """In a running backward: whether it adds to `.grad` of leaves (`backward`) rather than returning gradients
    (`torch.autograd.grad`).

    Arguments:
        leaf: the AccumulateGrad node of a tensor that this backward reaches.

    torch 2.11 to 2.13: `_will_engine_execute_node` refuses to answer about leaves in the second case.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        return False


backward_number = torch._C._current_graph_task_id
"""A number of the backward pass that this thread is in, -1 outside (private in torch 2.11 to 2.13)."""


def new_dtensor(local: torch.Tensor, spec: Any) -> Any:
    """A DTensor of `local` laid out as `spec` (a `DTensorSpec`), without gradient. Unlike a call of the class it skips
    an `__init__` that does nothing, behind a dynamo guard that does something (torch 2.11 to 2.13)."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One 1-D tensor with the elements of all `tensors`, which share dtype and device, in turn. Replaces
    `torch._utils._flatten_dense_tensors` (the operator beneath it: torch 2.11 to 2.13)."""
    return torch._C._nn.flatten_dense_tensors(tensors)


def unpack_into(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy what `packed` packed back into `tensors`, in a few kernels (`torch._foreach_copy_`, torch 2.11 to 2.13)."""
    torch._foreach_copy_(tensors, torch._C._nn.unflatten_dense_tensors(flat, tensors))


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


def on_cpu() -> AbstractContextManager[Any]:
    """New tensors are on the CPU whatever the caller's default is. Nothing where they are anyway: a device context sees
    every access to a tensor's attributes, which is a tenth of the time of a lowering."""
    return torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()


@contextmanager
def no_device_context() -> Iterator[None]:
    """Put aside the default-device contexts (`with torch.device(...)`) of the caller: a new one goes to the bottom of the
    stack of function modes, so that those would win over it. Private: the mode stack and `DeviceContext`."""
    from torch.utils._device import DeviceContext

    held: list[Any] = []
    while torch._C._len_torch_function_stack():
        held.append(torch._C._pop_torch_function_stack())
    for mode in reversed(held):
        if not isinstance(mode, DeviceContext):
            torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in reversed(held):
            torch._C._push_on_torch_function_stack(mode)


def hook_tables(x: Any, gradient: bool) -> list[dict[int, Any]]:
    """The tables of hooks on the gradients of a module or a tensor, or around a module's forward."""
    names = ("backward", "backward_pre", "post_accumulate_grad") if gradient else ("forward", "forward_pre")
    return [table for name in names if (table := getattr(x, f"_{name}_hooks", None)) is not None]


def next_node() -> int:
    """The number that autograd gives to the next node this thread makes; numbers rise. Private: `_get_sequence_nr`."""
    return torch.autograd._get_sequence_nr()  # type: ignore[no-any-return]


def node_number(node: Any) -> int:
    """The number of a node of autograd's graph. Private: `Node._sequence_nr`; those of leaves are the largest there is."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def gradient_node(t: torch.Tensor) -> Any:
    """The node that the gradient of `t`, which needs one, arrives at: that of its maker, or of the leaf itself. No function
    mode sees how the leaf is asked. Private: `DisableTorchFunction`."""
    with torch._C.DisableTorchFunction():
        return torch.autograd.graph.get_gradient_edge(t).node


def detached(t: torch.Tensor) -> torch.Tensor:
    """`t.detach()` that no function mode sees. Private: `DisableTorchFunction`."""
    with torch._C.DisableTorchFunction():
        return t.detach()
