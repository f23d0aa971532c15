"""Which modules of a model are experts: those that are handed a routing, and blocks that route by themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshplan.compiler.bind import Bound, BoundParam
from meshplan.compiler.experts_laws import Trials
from meshplan.ops.experts.block import Law
from meshplan.ops.experts.call import MlpNames
from meshplan.plan.patterns import within
from meshplan.plan.placements import Partial, Shard

LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Found:
    """One experts module.

    Attributes:
        path: where it is.
        experts: how many it has; 0 of a block of which it is only known that it runs on the tokens of each rank.
        packed: names of its parameters, each of which holds all experts along dim 0 and is split over ep; empty where each
            expert has parameters of its own.
        listed: these then. They are whole on every rank and used on the rank of their expert alone: a step that gives an expert
            no token leaves it without a gradient, as on one device, which FSDP could not.
        sizes: its attributes that count the experts.
        block: what its results are, where it is a block that loops over its experts itself, which are then the modules `each`
            inside it. Its other parameters are used on a rank's own tokens.
        inner: how etp splits each packed parameter, by its name in the module: a `Shard`, or `P` where its first rank alone
            computes with it (a bias that a sum must not have twice); others are whole.
        mlp: how it holds a gated MLP that the fused kernels can compute in its place.
    """

    path: str
    experts: int
    packed: tuple[str, ...]
    listed: tuple[str, ...]
    sizes: tuple[str, ...]
    inner: tuple[tuple[str, Shard | Partial], ...] = ()
    mlp: MlpNames | None = None
    each: tuple[str, ...] = ()
    block: Trials | None = field(default=None, compare=False)

    def inner_of(self, name: str) -> Shard | Partial | None:
        """How etp splits the packed parameter `name` of the model."""
        return dict(self.inner).get(name.rpartition(".")[2])


def experts_in(path: str, model: nn.Module, bound: Bound, known: dict[Any, Law] | None = None) -> list[Found]:
    """The experts modules at `path` or below it, and the blocks that have a router beside a list of modules that are alike.

    Arguments:
        known: what blocks share of their trials.
    """
    root = model.get_submodule(path)
    found: list[Found] = []
    for here, module in _inside(path, root):
        if not any(within(here, f.path) for f in found) and _takes_three(module):
            params = {name: p for name, p in bound.params.items() if within(name, here)}
            experts = _count(module, here, params)
            if experts:
                packed = tuple(name for name in params if name.rpartition(".")[0] == here)
                packed, listed = (packed, ()) if len(packed) == len(params) else ((), tuple(params))
                counts = (k for k, v in module.__dict__.items() if type(v) is int and v == experts)
                sizes = tuple(counts) if packed else ()
                found.append(Found(here, experts, packed, listed, sizes))
    for here, module in reversed(_inside(path, root)):  # those inside before those around them
        if not any(within(f.path, here) or within(here, f.path) for f in found):
            each = _each(module)
            if each and _scores(module, each):
                found.append(_block(here, module, each, bound, known))
    return found


def block_at(path: str, model: nn.Module, bound: Bound, alone: bool, known: dict[Any, Law]) -> list[Found]:
    """The block at `path`, or around the list at `path`, which the plan names where `experts_in` finds nothing: without a router
    of its own or, if each rank is `alone` with all experts, with any experts."""
    module = model.get_submodule(path)
    if isinstance(module, LISTS):
        above, _, own = path.rpartition(".")
        holder = model.get_submodule(above)
        each = _each(holder)
        return [_block(above, holder, each, bound, known)] if each and within(each[0], own) else []
    each = _each(module)
    holds = path and next(module.parameters(), None) is not None
    return [_block(path, module, each, bound, known)] if each or (holds and alone) else []


def _inside(path: str, root: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(".".join(filter(None, (path, inner))), module) for inner, module in root.named_modules()]


def _block(here: str, module: nn.Module, each: tuple[str, ...], bound: Bound, known: dict[Any, Law] | None) -> Found:
    inside = [".".join(filter(None, (here, name))) for name in each]
    listed = tuple(name for name in bound.params if any(within(name, one) for one in inside))
    return Found(
        here, len(each), (), listed, (), each=each, block=Trials(module, here, each, {} if known is None else known)
    )


def _each(module: nn.Module) -> tuple[str, ...]:
    """The paths of a block's experts inside it: modules that are alike in a list or dict of it, or that it names with numbers.
    Others beside them hold no parameters. Empty if there are no two."""
    if isinstance(module, (*LISTS, nn.Sequential)):
        return ()
    numbered: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, child in module.named_children():
        if isinstance(child, LISTS):
            numbered[f"{name}."] = [(f"{name}.{key}", one) for key, one in child.named_children()]
        elif re.search(r"\d$", name):
            numbered.setdefault(re.sub(r"\d+$", "", name), []).append((name, child))
    for many in numbered.values():
        holding = [(name, m) for name, m in many if next(m.parameters(), None) is not None]
        kinds = {(type(m), tuple((key, tuple(p.shape)) for key, p in m.named_parameters())) for _, m in holding}
        if len(holding) > 1 and len(kinds) == 1:
            return tuple(name for name, _ in holding)
    return ()


def _scores(module: nn.Module, each: tuple[str, ...]) -> bool:
    """Whether a block has a router: a parameter beside its experts with a row for each of them, or each in their list."""
    holder = each[0].rpartition(".")[0]
    rows = {len(each), len(list(module.get_submodule(holder).children())) if holder else 0}
    return any(
        p.dim() and p.shape[0] in rows
        for name, p in module.named_parameters()
        if not any(within(name, one) for one in each)
    )


def _takes_three(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(plain) == 3


def _count(module: nn.Module, path: str, params: Mapping[str, BoundParam]) -> int:
    """How many experts a module holds: the length of dim 0 of all its parameters, or its children that are alike; 0 if none."""
    if not params:
        return 0
    if all(name.rpartition(".")[0] == path for name in params):
        rows = {p.shape[0] if p.shape else 0 for p in params.values()}
        return rows.pop() if len(rows) == 1 and max(len(p.shape) for p in params.values()) > 2 else 0
    for children in (module, *module.children()):
        alike = {tuple((name, tuple(p.shape)) for name, p in child.named_parameters()) for child in children.children()}
        number = len(list(children.children()))
        if len(alike) == 1 and number > 1 and () not in alike:
            return number
    return 0
