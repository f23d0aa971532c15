"""Parameters as plain local tensors while the model runs, as DTensors to everyone else.

A module whose parameters are DTensors gets a subclass of its own class in which each such parameter is a property: inside
the step it returns a differentiable view of the local shard, outside it the DTensor. `state_dict`, optimizers, FSDP2 and
checkpoints read `_parameters` and never see the view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan.runtime.boundary import move
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.editing import Editing


class Step:
    """Whether this process is inside the forward (or a recompute) of a parallelised model."""

    depth = 0


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: DTensor) -> Tensor:
        ctx.spec = p._spec
        return p._local_tensor.view_as(p._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return DTensor(grads[0].contiguous(), ctx.spec, requires_grad=False)


ViewMove = tuple[str, str, AxisGroup, int, int]


def local_view(p: Tensor, moves: tuple[ViewMove, ...]) -> Tensor:
    """This rank's shard of parameter `p`, differentiable, through `moves` (src, dst, group, dim, size) if any."""
    if isinstance(p, DTensor):
        if torch.compiler.is_compiling():
            # A gradient that is a partial sum over an axis is reduced with all others, after backward: see gradients.py.
            x = p.to_local(grad_placements=p.placements)
        else:
            x = _Local.apply(p)
    else:
        x = p
    for src, dst, group, dim, size in moves:
        x = move(x, src, dst, group, dim, size)
    return x


def _getter(name: str) -> Callable[[nn.Module], Tensor | None]:
    def get(module: nn.Module) -> Tensor | None:
        p = module._parameters[name]
        if Step.depth == 0 or p is None:
            return p
        moves = module._meshplan_views[name]  # type: ignore[operator,index]
        if not Editing.running:
            return local_view(p, moves)
        with Editing.running[-1].quiet():
            return local_view(p, moves)

    return get


_CLASSES: dict[tuple[Any, ...], type] = {}


def lowered_class(
    cls: type, names: tuple[str, ...], forward: Callable[..., Any] | None = None, call: Callable[..., Any] | None = None
) -> type:
    """A subclass of `cls` with the parameters `names` as views and, unless None, `forward` and `__call__` in place of its own.

    It keeps the name, so that `type(m).__name__`, pickles of class names and logs read as before.
    """
    key = (cls, names, forward, call)
    if key not in _CLASSES:
        body: dict[str, Any] = {name: property(_getter(name)) for name in names}
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_meshplan_base": cls}
        if forward is not None:
            body["forward"] = forward
        if call is not None:
            body["__call__"] = call
        _CLASSES[key] = type(cls.__name__, (cls,), body)
    return _CLASSES[key]
