"""Parameters as plain local tensors while the model runs, as DTensors to everyone else.

A module whose parameters are DTensors gets a subclass of its own class in which each such parameter is a property:
inside the step it returns a differentiable view of the local shard, outside it the DTensor. `state_dict`, optimizers,
FSDP2 and checkpoints read `_parameters` and never see the view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan import compat
from meshplan.compat import new_dtensor
from meshplan.ops.derivative import require_first
from meshplan.runtime.editing import Editing


class Step:
    """Whether this process is inside the forward (or a recompute) of a parallelised model; the views it has made there.

    However often a parameter is used in a step it has one view, whose gradient arrives once, when that of all uses is there:
    FSDP2 would reduce a unit that is called twice at each call.
    """

    depth = 0
    views: ClassVar[dict[tuple[int, bool], tuple[Tensor, Tensor]]] = {}

    @classmethod
    def enter(cls) -> None:
        cls.depth += 1

    @classmethod
    def leave(cls) -> None:
        cls.depth -= 1
        if not cls.depth:
            cls.views.clear()


class _Local(torch.autograd.Function):
    """A DTensor parameter's local shard, and the way of its gradient into `p.grad`.

    AccumulateGrad would take the gradient as a DTensor through DTensor's dispatch, which costs more host time than a
    small layer's matmul. So it is put into `p.grad` here, where nobody could tell: not when hooks wait for it, and not
    when `torch.autograd.grad` wants it returned.
    """

    @staticmethod
    def forward(ctx: Any, p: DTensor) -> Tensor:
        ctx.p = p
        return p._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        require_first("parameter view")
        p, own = ctx.p, compat.unshared(grads)
        grad = grads[0].contiguous()
        if p._backward_hooks or p._post_accumulate_grad_hooks or not _accumulating(ctx):
            return new_dtensor(grad, p._spec)
        if p.grad is None:
            # Both summands of `a + b` are given one gradient; each parameter keeps one of its own.
            p.grad = new_dtensor(grad if own or grad is not grads[0] else grad.clone(), p._spec)
        else:
            p.grad._local_tensor.add_(grad)
        return None


_apply = compat.bare_apply(_Local)
_latest: tuple[int, bool] = (-1, True)


def _accumulating(ctx: Any) -> bool:
    """Whether the backward that runs now adds to `.grad`; asked once for each backward."""
    global _latest
    number, answer = _latest
    now = compat.backward_number()
    if number != now:
        answer = compat.accumulates(ctx.next_functions[0][0])
        _latest = now, answer
    return answer


def local_view(p: Tensor, moves: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
    """This rank's shard of parameter `p`, differentiable, through `moves` (redistributions, a cast) if any."""
    if not isinstance(p, DTensor):
        x = p
    elif torch.compiler.is_compiling() or compat.in_function_transform():
        # A gradient that is a partial sum over an axis is reduced with all others, after backward: see gradients.py.
        x = p.to_local(grad_placements=p.placements)
    else:
        x = _view(p)
    for move in moves:
        x = move(x)
    return x


def _view(p: DTensor) -> Tensor:
    if not Step.depth or torch.is_inference_mode_enabled():
        return _apply(p)
    key = id(p), torch.is_grad_enabled() and p.requires_grad
    held = Step.views.get(key)
    if held is None:
        held = Step.views[key] = p, _apply(p)
    return held[1]


def _recomputing() -> bool:
    """Whether backward runs a forward again, for a checkpoint of the model's own: hooks, in contrast, have gradients off."""
    return compat.in_backward() and torch.is_grad_enabled()


def _getter(name: str) -> Callable[[nn.Module], Tensor | None]:
    def get(module: nn.Module) -> Tensor | None:
        p = module._parameters[name]
        if p is None or not (Step.depth or _recomputing()):
            return p
        moves = module.__dict__["_meshplan_views"][name]
        if not Editing.running:
            return local_view(p, moves)
        with Editing.running[-1].quiet():
            return local_view(p, moves)

    return get


_CLASSES: dict[tuple[Any, ...], type] = {}


def lowered_class(
    cls: type, names: tuple[str, ...], forward: Callable[..., Any] | None = None, call: Callable[..., Any] | None = None
) -> type:
    """A subclass of `cls` with the parameters `names` as views and, unless None, `forward` and `__call__` in place of
    its own.

    It keeps the name, so that `type(m).__name__`, pickles of class names and logs read as before.
    """
    key = (cls, names, forward, call)
    if key not in _CLASSES:
        body: dict[str, Any] = {name: property(_getter(name)) for name in names}
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        body["_meshplan_base"] = cls
        if forward is not None:
            body["forward"] = forward
        if call is not None:
            body["__call__"] = call
        _CLASSES[key] = type(cls.__name__, (cls,), body)
    return _CLASSES[key]
