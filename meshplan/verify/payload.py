"""One device that hands experts the rows that ranks would get: rounded, where the plan's `experts.payload` rounds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshplan.compiler.bind import bind
from meshplan.compiler.experts import experts_in
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
    held = {path: model.get_submodule(path) for path in found}
    before = {path: module.__dict__.get("forward") for path, module in held.items()}
    for path, module in held.items():
        module.forward = _Rounding(Routed(module, path))
    try:
        yield
    finally:
        for path, module in held.items():
            del module.forward
            if (own := before[path]) is not None:
                module.forward = own


class _Rounding:
    def __init__(self, routed: Routed) -> None:
        self.routed = routed

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens, indices, weights = self.routed.told(args, kwargs)
        out: Tensor = self.routed.own(rounded(tokens), indices, weights)
        return out
