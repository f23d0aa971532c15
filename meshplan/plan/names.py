"""The names by which a plan may call a model's modules and parameters: wrappers seen through, aliases kept together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from meshplan.errors import PlanError
from meshplan.plan.patterns import match

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Segments that `torch.compile`, the checkpoint wrapper and FSDP1 put into a path; a plan does not see them."""
ADAPTERS = ("base_model.model", "base_layer")
"""Path pieces that adapter libraries insert. They do move parameters, so a plan has to say them."""


@dataclass(frozen=True)
class ModuleEntry:
    """One module object.

    Attributes:
        path: its first path, as `model.get_submodule` takes it, wrappers and all.
        paths: all its paths; more than one for a module that is shared.
        names: the same without wrapper segments: what patterns match.
        module: the module. Inside a wrapper it is the user's module, which has the signature and the parameters.
    """

    path: str
    paths: tuple[str, ...]
    names: tuple[str, ...]
    module: nn.Module

    @property
    def name(self) -> str:
        """The first name, the one that is printed."""
        return self.names[0]

    @property
    def has_forward(self) -> bool:
        """False for containers such as ModuleList, which are never called and so have no input and no output."""
        return getattr(type(self.module), "forward", None) is not nn.Module.forward


@dataclass(frozen=True)
class ParamEntry:
    """One parameter object: `names` are all its names (more than one for tied weights), the first as in
    `model.named_parameters()`; `plain` are the same without wrapper segments."""

    names: tuple[str, ...]
    plain: tuple[str, ...]
    param: nn.Parameter

    @property
    def name(self) -> str:
        """The first name, wrappers and all."""
        return self.names[0]


@dataclass(frozen=True)
class ModelNames:
    """All modules and parameters of a model, each object once, in the order of `named_modules`/`named_parameters`."""

    modules: tuple[ModuleEntry, ...]
    params: tuple[ParamEntry, ...]

    @cached_property
    def module_by_name(self) -> dict[str, ModuleEntry]:
        """The module each name stands for."""
        return {name: entry for entry in self.modules for name in entry.names}

    @cached_property
    def param_by_name(self) -> dict[str, ParamEntry]:
        """The parameter each name (without wrappers) stands for."""
        return {name: entry for entry in self.params for name in entry.plain}

    def match(self, pattern: str) -> list[ModuleEntry]:
        """The modules one of whose names `pattern` matches, each once."""
        found = {id(self.module_by_name[name]): name for name in match(pattern, self.module_by_name)}
        return [entry for entry in self.modules if id(entry) in found]

    def params_of(self, entry: ModuleEntry) -> dict[str, ParamEntry]:
        """The parameters at and below a module, by their name relative to it; its own come first."""
        below = entry.module.named_parameters(remove_duplicate=False)
        return {without_wrappers(name): self._param_by_id[id(param)] for name, param in below}

    @cached_property
    def _param_by_id(self) -> dict[int, ParamEntry]:
        return {id(entry.param): entry for entry in self.params}

    def moved(self, pattern: str) -> list[str]:
        """Names that `pattern` would match if adapters had not inserted a piece into them."""
        plain = {without_adapters(name): name for name in self.module_by_name}
        return [name for short, name in plain.items() if short != name and match(pattern, [short])]


def without_wrappers(path: str) -> str:
    """`path` without the segments of wrappers: `layers.0._orig_mod.up` is `layers.0.up`."""
    return ".".join(segment for segment in path.split(".") if segment not in WRAPPERS)


def without_adapters(name: str) -> str:
    """`name` without the pieces that adapter libraries insert: `layers.0.up.base_layer` is `layers.0.up`."""
    dotted = f".{name}."
    for piece in ADAPTERS:
        dotted = dotted.replace(f".{piece}.", ".")
    return dotted.strip(".")


def names_of(model: nn.Module) -> ModelNames:
    """The names of `model`, which may be on the meta device. Reads, and changes nothing.

    Raises PlanError: `lazy-parameter` where a shape is not known yet, `already-sharded` where a parameter is a DTensor.
    """
    by_name: dict[str, nn.Module] = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # A wrapper comes before what it wraps, and both have the same name: the later one is the user's module.
        by_name[without_wrappers(path)] = module
        paths.setdefault(id(module), []).append(path)
    names: dict[int, list[str]] = {}
    for name, module in by_name.items():
        names.setdefault(id(module), []).append(name)
    modules = tuple(
        ModuleEntry(_first(paths[id(module)], known[0]), tuple(paths[id(module)]), tuple(known), module)
        for known in names.values()
        for module in [by_name[known[0]]]
    )
    params: dict[int, list[str]] = {}
    objects: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        _check_param(name, param)
        params.setdefault(id(param), []).append(name)
        objects[id(param)] = param
    return ModelNames(
        modules,
        tuple(
            ParamEntry(tuple(known), tuple(map(without_wrappers, known)), objects[key]) for key, known in params.items()
        ),
    )


def _first(paths: Iterable[str], name: str) -> str:
    return next(path for path in paths if without_wrappers(path) == name)


def _check_param(name: str, param: nn.Parameter) -> None:
    if isinstance(param, UninitializedParameter):
        raise PlanError(
            f"parameter {name!r} is lazy: its shape is known only after a first call",
            code="lazy-parameter",
            legal="call the model once on a small input before planning",
        )
    if isinstance(param, DTensor):
        raise PlanError(
            f"parameter {name!r} is a DTensor already, laid out as {param.placements}",
            code="already-sharded",
            legal="the single-device model, before any other parallelism",
        )
