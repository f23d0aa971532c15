"""Which stored tensors make which tensor of the model: by name, or as transformers' own tables of renames and
conversions say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.plan.names import without_adapters
from meshplan.pretrained.files import Stored
from meshplan.pretrained.movement import Node, NotRecorded, Recording, Source
from meshplan.runtime.state import unwrapped


@dataclass(frozen=True)
class Sources:
    """What a folder has for a model.

    Attributes:
        nodes: how each of the model's tensors is made, by live name.
        missing: live names that nothing in the folder makes, and that no adapter owns.
        unexpected: what the folder has and the model does not take, by the name it would have in the model.
        adapters: live names of adapter weights, which are not in a base model's folder.
    """

    nodes: dict[str, Node]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    adapters: tuple[str, ...]


def sources_of(model: nn.Module, live: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> Sources:
    """Match the stored tensors to the model's `live` ones (by user name, global shapes).

    A transformers model, also inside of a PEFT wrapper, is loaded as transformers does it: its renames and conversions,
    its base model's prefix added or left out, the keys that it says to pass over. Any other model is matched by name.

    Raises PlanError `weight-conversion` for a conversion that cannot be followed piece by piece.
    """
    inner = transformers_model(model)
    adapters = adapter_names(model)
    names = {name: without_adapters(name).replace(".original_module.", ".") for name in live}
    plain: dict[str, list[str]] = {}
    for name in live:
        if name not in adapters:
            plain.setdefault(_without_saved(names[name]), []).append(name)
    sizes = {short: live[many[0]] for short, many in plain.items()}
    if inner is None:
        made: dict[str, Node] = {name: Source(name, s.shape) for name, s in stored.items() if name in sizes}
        unexpected: Iterable[str] = [name for name in stored if name not in sizes]
        ignored = lambda name, kind: False  # noqa: E731
    else:
        made, unexpected = _converted(inner, sizes, stored)
        ignored = _ignored(inner)
    return Sources(
        {name: made[short] for short, many in plain.items() if short in made for name in many},
        tuple(n for short, many in plain.items() if short not in made and not ignored(short, "missing") for n in many),
        tuple(sorted(name for name in set(unexpected) if not ignored(name, "unexpected"))),
        tuple(name for name in live if name in adapters),
    )


def transformers_model(model: nn.Module) -> Any:
    """The transformers model that `model` is, or that its PEFT wrapper holds; None for any other model."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        return model
    held = getattr(getattr(model, "base_model", None), "model", None)
    return held if isinstance(held, PreTrainedModel) else None


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Names of the weights that adapter layers (PEFT's) added beside the ones they wrap."""
    found = set()
    for path, module in unwrapped(model).named_modules():
        for kept in getattr(module, "adapter_layer_names", None) or ():
            held = getattr(module, kept, None)
            if isinstance(held, nn.Module) and hasattr(module, "base_layer"):
                found |= {f"{path}.{kept}.{name}" for name in held.state_dict()}
            elif isinstance(held, nn.ParameterDict) and hasattr(module, "base_layer"):
                found |= {f"{path}.{kept}.{name}" for name in held}
    return frozenset(found)


def _without_saved(name: str) -> str:
    """The name that a module PEFT trains as a whole (`modules_to_save`) had before it was copied."""
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)


def _converted(model: Any, sizes: dict[str, Tensor], stored: Mapping[str, Stored]) -> tuple[dict[str, Node], set[str]]:
    """By the model's own names: what makes each tensor, and what would make one that the model does not have."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renames = [t for t in table if isinstance(t, WeightRenaming)]
    converters = [t for t in table if isinstance(t, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix

    def renamed(name: str) -> tuple[str, str | None]:
        found = rename_source_key(name, renames, converters, prefix, sizes)
        if found[0] not in sizes and name in sizes:  # it has the model's name already
            return rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=sizes)
        return found

    made: dict[str, Node] = {}
    unexpected: set[str] = set()
    groups: dict[str, tuple[Any, list[str]]] = {}
    with Recording() as recording:
        # In the library's order: it decides in which order a conversion joins its tensors.
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = renamed(name)
            if target not in sizes:
                unexpected.add(target)
            elif pattern is None:
                if target in made:
                    raise PlanError(f"{name} is a second tensor for {target}", code="weight-conversion")
                made[target] = Source(name, stored[name].shape)
            else:
                converter, sources = groups.setdefault(target, (deepcopy(by_pattern[pattern]), []))
                sources.append(name)
                meta = recording.source(name, stored[name].shape, stored[name].dtype)
                converter.add_tensor(target, name, pattern, meta)
        for target, (converter, sources) in groups.items():
            for name, node in _results(converter, target, sources, model, recording).items():
                if name in sizes:
                    made[name] = node
                else:
                    unexpected.add(name)
    return made, unexpected


def _results(converter: Any, target: str, sources: list[str], model: Any, recording: Recording) -> dict[str, Node]:
    """What `converter` makes of the meta tensors it was given, as nodes by the names of the results."""
    try:
        out = converter.convert(target, model=model, config=model.config)
        many = {name: value[0] if isinstance(value, list) else value for name, value in out.items()}
        return {name: recording.node(value) for name, value in many.items()}
    except (NotRecorded, RuntimeError, ValueError, NotImplementedError, KeyError, AttributeError, TypeError) as error:
        steps = ", ".join(type(op).__name__ for op in converter.operations)
        raise PlanError(
            f"transformers makes {target} of {len(sources)} stored tensors ({sources[0]}, ...) by {steps}, which cannot "
            f"be done piece by piece: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            code="weight-conversion",
            legal="a folder saved with save_original_format=False: it holds the tensors as the model has them",
        ) from error


def _ignored(model: Any) -> Any:
    """Whether transformers passes over a key of that name that is `missing` or `unexpected`."""
    missing = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    # Buffers that older versions stored, and that are computed now.
    unexpected += [r"rotary_emb\.inv_freq"] if any(b.endswith("rotary_emb.inv_freq") for b in buffers) else []
    unexpected += [r"(^|\.)position_ids$"] if any(b.endswith("position_ids") for b in buffers) else []
    patterns = {"missing": missing, "unexpected": unexpected}

    def ignored(name: str, kind: str) -> bool:
        return any(re.search(pattern, name) for pattern in patterns[kind])

    return ignored


def same_kind(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether a stored dtype may become the model's by rounding or widening: both floating, of 16 bits or more."""
    return a == b or (a.is_floating_point and b.is_floating_point and min(a.itemsize, b.itemsize) >= 2)
