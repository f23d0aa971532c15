"""FSDP2's private state: gathers, gradients and what a failed step leaves."""

from __future__ import annotations

from typing import Any

import torch


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
