"""A small model of the same shape: configurations with fewer layers and narrower heads, head counts and ratios kept."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.verify.job import resolve_factory

HEADS = ("num_attention_heads", "n_heads", "n_head")
HIDDEN = ("hidden_size", "dim", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layers", "n_layer")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "lora_rank", *HIDDEN)
"""Endings of names of fields that are widths, beside those that end in `head_dim`."""

HEAD_WIDTH, MOST_LAYERS, VOCAB_STEP, MOST_EXPERTS, GRAIN = 8, 2, 256, 16, 16


def shrunk(factory: Callable[[], nn.Module] | str) -> Callable[[], nn.Module]:
    """A factory of the small relative of what `factory` builds: the same class with a shrunk `config`.

    The large model is built on the meta device, to read its configuration. The result can be pickled.

    Raises PlanError `cannot-shrink` if the model has no `config`, or that names no width or no number of heads.
    """
    with torch.device("meta"):
        model = resolve_factory(factory)()
    config = getattr(model, "config", None)
    if config is None:
        raise _refused(f"{type(model).__name__} has no `config`")
    return partial(_from_config, type(model), shrink_config(config))


def shrink_config(config: Any) -> Any:
    """A copy of a configuration (a dataclass or a transformers configuration) with small sizes.

    Head counts, their ratios and all options stay. A head becomes at most 8 wide, and every width shrinks by the same
    factor but keeps its divisibility by powers of two up to 16, so that a degree which divides the large model divides
    the small one. Two layers remain, or as many as show every layer type; a vocabulary V becomes 256 + V mod 256;
    experts beyond 16 become 16.

    Raises PlanError `cannot-shrink` where no width or no number of heads is known by name.
    """
    fields = _fields(config)
    heads, hidden = _first(fields, HEADS), _first(fields, HIDDEN)
    if heads is None or hidden is None:
        what = "width" if hidden is None else "number of heads"
        raise _refused(f"{type(config).__name__} has no {what} that is known by name")
    head_dim = fields.get("head_dim") or fields[hidden] // fields[heads]
    factor = Fraction(min(head_dim, HEAD_WIDTH), head_dim)
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name.endswith("head_dim"):
            changes[name] = max(2, math.ceil(value * factor / 2) * 2)  # rotary turns pairs
        elif name == hidden and value == fields[heads] * head_dim:
            changes[name] = fields[heads] * int(head_dim * factor)
        elif name.endswith(WIDTHS):
            changes[name] = _narrowed(value, factor)
        elif name in EXPERTS:
            changes[name] = min(value, MOST_EXPERTS)
    return _changed(config, changes | _fewer_layers(fields) | _fewer_words(fields))


def _narrowed(width: int, factor: Fraction) -> int:
    grain = math.gcd(width, GRAIN)
    return math.ceil(width * factor / grain) * grain


def _fewer_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    name = _first(fields, LAYERS)
    if name is None:
        return {}
    types = fields.get("layer_types")
    if not types:
        return {name: min(fields[name], MOST_LAYERS)}
    shows_all = max(list(types).index(kind) for kind in set(types)) + 1
    keep = min(fields[name], max(MOST_LAYERS, shows_all))
    return {name: keep, "layer_types": type(types)(types[:keep])}


def _fewer_words(fields: Mapping[str, Any]) -> dict[str, Any]:
    size = fields.get("vocab_size")
    if not isinstance(size, int) or size < 2 * VOCAB_STEP:
        return {}
    small = VOCAB_STEP + size % VOCAB_STEP
    special = {n: v for n, v in fields.items() if n.endswith("_token_id") and isinstance(v, int) and v >= small}
    return {"vocab_size": small} | dict.fromkeys(special, small - 1)


def _fields(config: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(config) and not hasattr(config, "to_dict"):
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return dict(config.to_dict()) if hasattr(config, "to_dict") else dict(vars(config))


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and not hasattr(config, "to_dict"):
        return dataclasses.replace(config, **changes)
    small = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(small, name, value)
    return small


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(fields.get(name), int)), None)


def _from_config(cls: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    return cls(copy.deepcopy(config))  # building a model may write into its configuration


def _refused(message: str) -> PlanError:
    return PlanError(
        message, code="cannot-shrink", legal="a factory that builds a small model of the same kind, without shrink"
    )
