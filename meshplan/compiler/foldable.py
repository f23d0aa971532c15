"""Which layers one trace can stand for: alike by what they hold, and by the calls they make where that could differ."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from meshplan.compiler.bind import Bound
from meshplan.compiler.capture import capture
from meshplan.compiler.kinds import Kind
from meshplan.compiler.precision import Precision
from meshplan.compiler.repeats import confirmed, equal_layers, input_signature, shared_keys
from meshplan.compiler.skeleton import fake_copy
from meshplan.compiler.sketch import Sketch

_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, int]]] = WeakKeyDictionary()


def foldable(
    model: nn.Module, mode: Any, bound: Bound, kinds: Mapping[str, list[Kind]], inputs: dict[str, Any],
    precision: Precision | None = None,
) -> dict[str, int]:  # fmt: skip
    """Groups of equal layers, by path. Layers that know their place in the list (`layer_idx`) are compared call by call in one
    trace of all of them, kept for the next lowering of the same model on the same inputs: layouts do not enter it."""
    groups, numbered = equal_layers(model, bound, kinds)
    if not numbered or not groups:
        return groups
    unplaced: dict[str, list[Kind]] = {name: [] for name in kinds}
    every, _ = equal_layers(model, bound, unplaced)
    key = (input_signature((), inputs), tuple(sorted(every.items())), precision or Precision(), bound.experts)
    known = _KNOWN.get(model)
    if known is None or known[0] != key:
        cast = precision.inputs if precision else None
        trace = capture(partial(fake_copy, model, mode), mode, inputs, None, cast, Sketch())[1]
        known = _KNOWN[model] = (key, confirmed(every, trace))
    same = known[1]
    return shared_keys({path: (group, same[path]) for path, group in groups.items() if path in same})


def heard_inside(traced: nn.Module, groups: Mapping[str, int]) -> bool:
    """Whether someone else listens to a module inside of a layer that stands for others, in a model that was just `traced`:
    what such a hook collects (transformers returns attentions that way) would be the first layer's alone."""
    for path in groups:
        try:
            layer = traced.get_submodule(path)
        except AttributeError:  # inside a hollow one
            continue
        for name, module in layer.named_modules():
            # The trace itself has one of each.
            if name and (len(module._forward_hooks) > 1 or len(module._forward_pre_hooks) > 1):
                return True
    return False
