"""One device that hands experts the rows that ranks would get: rounded, where the plan's `experts.payload` rounds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshplan.compiler.bind import bind
from meshplan.compiler.experts_found import experts_in
from meshplan.ops.experts.call import Routed
from meshplan.ops.experts.payload import rounded
from meshplan.plan.plan import Plan


@contextmanager
def single_device_payload(model: nn.Module, plan: Plan | None) -> Iterator[None]:
    """Within the block the experts of `model`, which is on one device, compute with rounded tokens. Gradients are those of a
    rounding with the derivative 1."""
    if plan is None or plan.experts is None or plan.experts.payload is None:
        yield
        return
    bound = bind(plan, model)
    found = {f.path: f for path in bound.experts for f in experts_in(path, model, bound)}
    rounding: list[tuple[nn.Module, Callable[..., Tensor]]] = []
    for path, f in found.items():
        module = model.get_submodule(path)
        if f.block is None:
            rounding.append((module, _Rounding(Routed(module, path))))
        else:  # it calls them itself
            rounding += [(e, partial(_on_rounded, e.forward)) for e in map(module.get_submodule, f.each)]
    before = [module.__dict__.get("forward") for module, _ in rounding]
    for module, forward in rounding:
        module.forward = forward
    try:
        yield
    finally:
        for (module, _), own in zip(rounding, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own


def _on_rounded(own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return own(rounded(x.reshape(-1, x.shape[-1])).view_as(x))


class _Rounding:
    def __init__(self, routed: Routed) -> None:
        self.routed = routed

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens, indices, weights = self.routed.told(args, kwargs)
        out: Tensor = self.routed.own(rounded(tokens), indices, weights)
        return out
