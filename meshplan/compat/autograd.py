"""Questions to the autograd engine that torch answers in private."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


def in_backward() -> bool:
    """True while the calling thread runs a node, hook or callback of the autograd engine (torch 2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """True inside a function that `torch.utils.checkpoint` will run again in backward, the non-reentrant way (its hooks on
    saved tensors are the innermost ones; private in torch 2.11 to 2.13)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def on_backward_end(callback: Any) -> None:
    """Run `callback()` when the backward that is running now is over; later callbacks run after earlier ones. Called
    inside a hook or node of the autograd engine."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


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
