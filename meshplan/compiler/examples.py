"""The model's example inputs: global shapes and dtypes from the plan or from the caller, and how each is placed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.bind import Bound
from meshplan.compiler.context import in_order
from meshplan.compiler.frames import positional_names
from meshplan.compiler.kinds import Kind, N
from meshplan.compiler.opaque import refuse_state
from meshplan.compiler.signature import arguments_of
from meshplan.errors import PlanError
from meshplan.mesh.build import expand
from meshplan.plan.placements import Mirrored, Shard
from meshplan.plan.rules import Input


@dataclass(frozen=True)
class Leaf:
    """One tensor of an input (`shape` global, a kind an axis) or one Python constant (`shape` None)."""

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    kinds: tuple[Kind, ...]
    requires_grad: bool = False
    constant: Any = None

    def signature(self) -> Any:
        if self.shape is None:
            return repr(self.constant)
        return (self.shape, str(self.dtype), self.requires_grad)


@dataclass(frozen=True)
class Example:
    """One argument of forward: its flattened leaves and their structure."""

    leaves: tuple[Leaf, ...]
    structure: Any

    def key(self) -> tuple[Any, ...]:
        return tuple(leaf.signature() for leaf in self.leaves)


OMITTED: Any = type("Omitted", (), {"__repr__": lambda self: "<left to forward's default>"})()
"""An example in the place of an input of the plan that this call does not pass."""


def by_name(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any] | Tensor | None) -> dict[str, Any]:
    """Example inputs by argument name; a tensor or a sequence is matched to forward's positional arguments."""
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        return dict(inputs)
    many = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    names = positional_names(model)
    if len(many) > len(names):
        raise PlanError(
            f"{len(many)} example inputs for a forward that takes {len(names)} by position", code="more-layouts-than-inputs",
            module="", legal=names,
        )  # fmt: skip
    return dict(zip(names, many, strict=False))


def example_inputs(model: nn.Module, bound: Bound, inputs: Any, axes: Mapping[str, int]) -> dict[str, Example]:
    """What forward is traced with, on `axes` with their degrees. The caller's inputs replace the plan's of the same name but
    keep its `place`; one that is `OMITTED` is not passed.

    Raises PlanError: `no-inputs` where neither gives a shape, `argument-state` for objects that carry tensors,
    `input-not-divisible` for a sequence that has no two halves for each rank of cp.
    """
    given = by_name(model, inputs)
    out: dict[str, Example] = {}
    for name, item in bound.inputs.items():
        if name.partition(".")[0] in given or name in given:
            continue
        if item.shape is None or "." in name:
            raise PlanError(
                f"input {name!r} has no shape in the plan and no example was given", code="no-inputs",
                where=item.source.where, legal="shape: and dtype: in the plan, or inputs= of parallelize and lower",
            )  # fmt: skip
        given[name] = item
    if not given:
        raise PlanError(
            "neither the plan nor the call gives the model's inputs", code="no-inputs", legal="inputs: in the plan"
        )
    for name, value in given.items():
        if value is OMITTED:
            continue
        out[name] = _example(name, value, bound, list(axes))
        for leaf in out[name].leaves:
            _refuse_uneven_halves(leaf, axes)
    return out


def _refuse_uneven_halves(leaf: Leaf, axes: Mapping[str, int]) -> None:
    """A sequence in zigzag order is cut in two pieces a rank, whatever length a call has."""
    for (axis, degree), kind in zip(axes.items(), leaf.kinds, strict=False):
        if not isinstance(kind, Shard) or not isinstance(kind.parts, Mirrored):
            continue
        size, pieces = sum(kind.parts), len(kind.parts) * degree
        if size % pieces:
            raise PlanError(
                f"dim {kind.dim} of {leaf.key!r} has size {size}, not divided by {axis} {pieces}",
                code="input-not-divisible", module="", legal=f"a multiple of {pieces}",
            )  # fmt: skip


def _example(name: str, value: Any, bound: Bound, axes: Sequence[str]) -> Example:
    if isinstance(value, Input):
        if value.shape is None:
            raise PlanError(f"input {name!r} has no shape", code="no-inputs", legal="shape: in the plan")
        place = dict(value.place) or dict(bound.inputs[name].place if name in bound.inputs else {})
        leaf = Leaf(
            name, tuple(value.shape), value.dtype or torch.get_default_dtype(), _kinds(place, axes, value.shape, bound)
        )
        return Example((leaf,), compat.flatten(0)[1])
    leaves = []
    keyed = compat.flatten_with_path(value)
    for path, x in keyed:
        key = f"{name}.{path}" if path else name
        item = bound.inputs.get(key) or bound.inputs.get(name)
        if isinstance(x, Tensor):
            place = dict(item.place) if item else {}
            leaves.append(Leaf(key, tuple(x.shape), x.dtype, _kinds(place, axes, x.shape, bound), x.requires_grad))
        else:
            refuse_state(key, x)
            leaves.append(Leaf(key, None, None, (), constant=x))
    return Example(tuple(leaves), compat.flatten(value)[1])


def _kinds(place: Mapping[str, Any], axes: Sequence[str], shape: Sequence[int], bound: Bound) -> tuple[Kind, ...]:
    kinds: dict[str, Kind] = dict.fromkeys(axes, N)
    for axis, placement in place.items():
        for one in expand((axis,)):
            if one in kinds and isinstance(placement, Shard):
                dim = placement.dim % max(len(shape), 1)
                kinds[one] = in_order(replace(placement, dim=dim), one, shape[dim] if shape else 1, bound.plan.context)
    return tuple(kinds[a] for a in axes)


def refuse_ignored(
    model: nn.Module, bound: Bound, examples: Mapping[str, Example], given: Sequence[int], used: Collection[int]
) -> None:
    """Raise PlanError `ignored-input` for a declared input that forward takes into its `**kwargs` and computes nothing with:
    shifted labels that a model does not know, say, in whose place it shifts others.

    Arguments:
        given: the values of the input tensors, in the order of `examples`; used: values that some call or the output uses.
    """
    named = arguments_of(model).names
    values = iter(given)
    for name, example in examples.items():
        own = [next(values) for leaf in example.leaves if leaf.shape is not None]
        item = bound.inputs.get(name)
        if item is not None and name not in named and own and not any(v in used for v in own):
            raise PlanError(
                f"forward takes the input {name!r} into its **kwargs, and computes nothing with it", code="ignored-input",
                module="", where=item.source.key_where, legal=[n for n in examples if n != name],
            )  # fmt: skip
