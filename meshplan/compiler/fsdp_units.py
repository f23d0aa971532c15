"""Which parameters each FSDP unit owns, and the dim each of them is cut along: the same to predict and to apply."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshplan.compiler.fsdp_schedule import FsdpParam, FsdpUnit, Strategy, resharded_after_forward
from meshplan.errors import PlanError

ShardDimOf = Callable[[nn.Parameter], int | None]
Reshard = bool | Mapping[str, bool] | None


@dataclass(frozen=True)
class UnitParams:
    """What one unit owns.

    Attributes:
        path: the unit's path, "" for the root.
        module: the module itself.
        params: (name in the model, parameter) in the order FSDP2 packs them: submodules before the modules around them.
        foreign: parameters of the subtree that an enclosing unit owns, because it holds them too (tied weights), or that
            no unit does.
    """

    path: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    foreign: frozenset[nn.Parameter]


def owned_parameters(
    model: nn.Module, units: Sequence[str], whole: frozenset[str] = frozenset()
) -> tuple[UnitParams, ...]:
    """The units of `model`, the root first and always among them, in `named_modules()` order.

    Arguments:
        whole: names of parameters that no unit owns: every rank keeps them whole.

    A parameter belongs to the innermost unit around the module that holds it. A tied parameter, held in several units,
    belongs to the one of them that encloses all others: it is gathered whenever one of them runs.

    Raises:
        PlanError `no-such-module`, `unit-without-forward` (a ModuleList has no call to hook), `tied-across-units` (no
        unit that holds the parameter encloses the others), `scalar-parameter` and `strided-parameter` (FSDP2 cannot cut
        them).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = {id(model)} | {id(_unit_module(modules, path)) for path in units}
    canonical = {id(m): path for path, m in model.named_modules()}
    holders: dict[nn.Parameter, set[str]] = {}
    for path, module in modules.items():
        owner = _enclosing(path, modules, chosen, canonical)
        for param in module.parameters(recurse=False):
            holders.setdefault(param, set()).add(owner)
    names = {param: name for name, param in model.named_parameters()}
    owner_of = {param: _owner(names[param], paths) for param, paths in holders.items()}
    for param, name in names.items():
        if name not in whole:
            _check_cuttable(name, param)
    found = []
    for path, module in model.named_modules():
        if id(module) in chosen:
            seen = dict.fromkeys(p for m in _managed(module, chosen) for p in m.parameters(recurse=False))
            params = tuple((names[p], p) for p in seen if owner_of[p] == path and names[p] not in whole)
            foreign = frozenset(
                p for p in module.parameters() if path in holders[p] and (owner_of[p] != path or names[p] in whole)
            )
            found.append(UnitParams(path, module, params, foreign))
    return tuple(found)


def choose_shard_dim(shape: Sequence[int], n: int) -> int:
    """The dim to cut a parameter of local `shape` into `n`: dim 0 if it divides, else the first dim that does, else dim
    0, padded to a multiple of `n` (FSDP2 pads no other). (1, 8) on 4 ranks is cut along dim 1, where dim 0 would move
    four times its size."""
    return next((dim for dim, size in enumerate(shape) if size % n == 0), 0)


def shard_dim(param: torch.Tensor, n: int) -> int:
    """`choose_shard_dim` of a plain parameter, or of a DTensor that is already split on other axes. Where such a split
    is uneven the ranks of that axis hold different lengths and must still choose alike, so that dim does not count."""
    placements = getattr(param, "placements", None)
    if placements is None:
        return choose_shard_dim(param.shape, n)
    mesh = param.device_mesh  # type: ignore[attr-defined]
    sizes = list(param.shape)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            degree = mesh.size(axis)
            uneven = sizes[placement.dim] % degree != 0
            sizes[placement.dim] = -1 if uneven or sizes[placement.dim] < 0 else sizes[placement.dim] // degree
    return next((dim for dim, size in enumerate(sizes) if size >= 0 and size % n == 0), 0)


def resharding(strategy: Strategy, path: str, override: Reshard = None) -> bool:
    """Whether the unit at `path` is freed after its forward; `override` is for all units, or by path."""
    own = override.get(path) if isinstance(override, Mapping) else override
    return resharded_after_forward(strategy, path == "", own)


def fsdp_units(
    model: nn.Module,
    units: Sequence[str],
    *,
    shard: int,
    strategy: Strategy = "zero3",
    reshard_after_forward: Reshard = None,
    shard_dim_of: ShardDimOf | None = None,
    local_shape_of: Callable[[str, nn.Parameter], Sequence[int]] | None = None,
    unused: frozenset[str] = frozenset(),
    whole: frozenset[str] = frozenset(),
) -> tuple[FsdpUnit, ...]:
    """The units of `model` (which FSDP2 has not touched; it may be on meta) as `fsdp_events` takes them.

    Arguments:
        units: paths of the units; the root is added.
        shard: ranks over which parameters are cut.
        strategy, reshard_after_forward, shard_dim_of: as for `lowering.fsdp.apply_fsdp`.
        local_shape_of: (name, parameter) -> its shape after tensor parallelism; default: its own (local) shape.
        unused: names of trainable parameters that no backward reaches.
        whole: as for `owned_parameters`.
    """

    def describe(name: str, param: nn.Parameter) -> FsdpParam:
        shape = tuple(local_shape_of(name, param) if local_shape_of else _local(param).shape)
        dim = shard_dim_of(param) if shard_dim_of else None
        if dim is None:
            dim = choose_shard_dim(shape, shard) if local_shape_of else shard_dim(param, shard)
        return FsdpParam(name, shape, param.dtype, dim % len(shape), param.requires_grad, name not in unused)

    return tuple(
        FsdpUnit(
            path=u.path,
            params=tuple(describe(name, param) for name, param in u.params),
            is_root=u.path == "",
            reshard_after_forward=resharding(strategy, u.path, reshard_after_forward),
        )
        for u in owned_parameters(model, units, whole)
    )


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param


def _unit_module(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    if path not in modules:
        near = difflib.get_close_matches(path, modules, n=3)
        raise PlanError(
            f"there is no module {path!r} to make an fsdp unit of",
            code="no-such-module",
            legal=near or "the path of a module",
        )
    module = modules[path]
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise PlanError(
            f"{path!r} is a {type(module).__name__}, which is never called, so nothing would gather its parameters",
            code="unit-without-forward",
            module=path,
            legal=[f"{path}.{name}" for name, _ in module.named_children()] or "a module with a forward",
        )
    return module


def _enclosing(path: str, modules: Mapping[str, nn.Module], chosen: set[int], canonical: Mapping[int, str]) -> str:
    while path and id(modules[path]) not in chosen:
        path = path.rpartition(".")[0]
    return canonical[id(modules[path])]


def _owner(name: str, paths: set[str]) -> str:
    for path in paths:
        if all(other == path or path == "" or other.startswith(f"{path}.") for other in paths):
            return path
    raise PlanError(
        f"{name} is shared by the fsdp units {sorted(paths)}, and each would gather and reduce a copy of its own",
        code="tied-across-units",
        module=name.rpartition(".")[0],
        legal="one unit around all of them, or leave those modules out of the units so that the root owns them",
    )


def _managed(module: nn.Module, chosen: set[int]) -> Iterator[nn.Module]:
    """Submodules before their parents, not entering other units: the walk of torch's `_get_managed_modules`."""
    seen: set[int] = set()

    def walk(m: nn.Module) -> Iterator[nn.Module]:
        seen.add(id(m))
        for child in m.children():
            if id(child) not in seen and id(child) not in chosen:
                yield from walk(child)
        yield m

    return walk(module)


def _check_cuttable(name: str, param: torch.Tensor) -> None:
    if param.ndim == 0:
        raise PlanError(
            f"{name} has no dim that could be cut",
            code="scalar-parameter",
            module=name.rpartition(".")[0],
            legal="a parameter of shape (1,)",
        )
    if not param.is_contiguous():
        raise PlanError(
            f"{name} has strides {tuple(param.stride())}; fsdp cuts contiguous parameters only",
            code="strided-parameter",
            module=name.rpartition(".")[0],
            legal="nn.Parameter(parameter.contiguous())",
        )
