"""A plan for a model, rewritten for the same model with adapters (LoRA) around some of its modules.

The base weight keeps its layout, and a low-rank pair follows it, so that the adapter's output is laid out as the base's:

    base weight         A [r, in]    B [out, r]    output of both
    split on its output   R            S(0)          S(-1)
    split on its input    S(1)         R             P, summed once for both
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.layouts import Layout
from meshplan.plan.names import ModelNames, ModuleEntry, names_of, without_adapters
from meshplan.plan.patterns import match
from meshplan.plan.placements import R, S, Shard
from meshplan.plan.rules import Rule
from meshplan.plan.shorthands import expand, output_dim

if TYPE_CHECKING:
    from meshplan.plan.plan import Plan

LOW_RANK = ("lora_A", "lora_B")


def adapted(plan: Plan, model: nn.Module) -> Plan:
    """`plan`, written for the model without adapters, as it reads for `model`, which has them (`get_peft_model`).

    Patterns are matched by the names that the bare model has; a rule whose modules all read alike stays one rule.
    Adapter weights that are no low-rank pair stay replicated.

    Raises PlanError: `no-such-module` where a pattern means nothing in the bare model either, and what shorthands raise.
    """
    names = names_of(model)
    bare: dict[str, ModuleEntry] = {}
    for entry in names.modules:
        for name in entry.names:
            # The wrapper comes before what it wraps, and stands at its place.
            bare.setdefault(without_adapters(name), entry)
    changes: dict[str, Any] = {"rules": tuple(r for rule in plan.rules for r in _rules(rule, bare, names))}
    for key in ("fsdp", "recompute", "compile"):
        section = getattr(plan, key)
        if section is not None and isinstance(section.units, tuple):
            changes[key] = replace(
                section, units=tuple(_unit(at, bare, section.source.child("units")) for at in section.units)
            )
    if plan.fsdp is not None and plan.fsdp.shard_dims:
        dims = {_parameter(at, names): dim for at, dim in plan.fsdp.shard_dims.items()}
        changes["fsdp"] = replace(changes["fsdp"], shard_dims=dims)
    return replace(plan, **changes)


def _rules(rule: Rule, bare: dict[str, ModuleEntry], names: ModelNames) -> list[Rule]:
    found = _matched(rule.at, bare, rule.source.child("at"))
    each = {entry.name: _one(rule, entry) for entry in found}
    pattern = _prefixed(rule.at, found, names)
    if len({str(one.to_dict() | {"at": ""}) for one in each.values()}) == 1 and pattern is not None:
        return [replace(next(iter(each.values())), at=pattern)]
    return [replace(one, at=name) for name, one in each.items()]


def _matched(pattern: str, bare: dict[str, ModuleEntry], source: Any) -> list[ModuleEntry]:
    found = list({id(bare[name]): bare[name] for name in match(pattern, bare)}.values())
    if not found:
        raise PlanError(
            f"{pattern!r} matches no module, nor would it without the adapters",
            code="no-such-module",
            where=source.where,
            legal="a pattern of the bare model's names",
        )
    return found


def _prefixed(pattern: str, found: Iterable[ModuleEntry], names: ModelNames) -> str | None:
    """`pattern` behind the adapter library's prefix, if that means exactly the modules `found`."""
    wanted = {entry.name for entry in found}
    prefixes = {name for name in names.module_by_name if name and without_adapters(name) == ""}
    for prefix in ("", *sorted(prefixes)):
        longer = f"{prefix}.{pattern}".strip(".")
        if {entry.name for entry in names.match(longer)} == wanted:
            return longer
    return None


def _one(rule: Rule, entry: ModuleEntry) -> Rule:
    """What `rule` says of the module at `entry`, in the names that it has now."""
    module, copies = entry.module, _copies(entry.module)
    base: Any = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        if not copies:
            return rule
        explicit = expand(rule, module.original_module)  # type: ignore[arg-type]
        params = {f"{where}.{name}": layout for where in copies for name, layout in explicit.params.items()}
        return replace(explicit, params=params)
    explicit = expand(rule, base)
    params = {f"base_layer.{name}": layout for name, layout in explicit.params.items()}
    weight = getattr(base, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2 and all(hasattr(module, n) for n in LOW_RANK):
        for axis, placement in explicit.params.get("weight", {}).items():
            if isinstance(placement, Shard):
                _follow(params, module, axis, placement, output_dim(rule, base, weight))
    return replace(explicit, params=params)


def _copies(module: nn.Module) -> list[str]:
    """Where PEFT keeps the original and the trained copies of a module that it trains as a whole."""
    saved = getattr(module, "modules_to_save", None)
    if not isinstance(saved, nn.ModuleDict) or not isinstance(getattr(module, "original_module", None), nn.Module):
        return []
    return ["original_module", *(f"modules_to_save.{name}" for name in saved)]


def _follow(params: dict[str, Layout], module: nn.Module, axis: str, placement: Shard, out_dim: int) -> None:
    """Lay out the low-rank pairs of `module` as its base weight's `placement` on `axis` makes them."""
    a, b = (getattr(module, name) for name in LOW_RANK)
    column = placement.dim % 2 == out_dim
    for name in a:
        if not hasattr(a[name], "weight") or a[name].weight.ndim != 2:
            continue
        params.setdefault(f"lora_A.{name}.weight", {})[axis] = R if column else S(1, placement.parts)
        params.setdefault(f"lora_B.{name}.weight", {})[axis] = S(0, placement.parts) if column else R
        if getattr(b[name], "bias", None) is not None:
            params.setdefault(f"lora_B.{name}.bias", {})[axis] = S(0, placement.parts) if column else R


def _unit(pattern: str, bare: dict[str, ModuleEntry], source: Any) -> str:
    found = _matched(pattern, bare, source)
    prefix = _common(pattern, found[0])
    return f"{prefix}.{pattern}".strip(".")


def _common(pattern: str, entry: ModuleEntry) -> str:
    """What adapters put in front of the name of `entry`."""
    plain = without_adapters(entry.name)
    return entry.name.removesuffix(plain).strip(".") if plain else entry.name


def _parameter(pattern: str, names: ModelNames) -> str:
    plain = {without_adapters(name): name for name in names.param_by_name}
    found = [plain[name] for name in match(pattern, plain)]
    if not found:
        raise PlanError(f"{pattern!r} in fsdp.shard_dims matches no parameter", code="no-such-parameter")
    head, _, tail = pattern.rpartition(".")
    moved = ".base_layer." if ".base_layer." in found[0] else "."
    prefix = "base_model.model." if found[0].startswith("base_model.model.") else ""
    return f"{prefix}{head}{moved}{tail}"
