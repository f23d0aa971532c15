"""Puts `regions: dtensor` onto a user's module: every redistribution is a DTensor `redistribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from meshplan import compat
from meshplan.compiler.dtensor_plan import DTensorPlan
from meshplan.compiler.frames import argument_keys
from meshplan.ops.dropout import DropoutStreams
from meshplan.plan import placements as user
from meshplan.runtime.comm import chunk_offset, chunk_sizes
from meshplan.runtime.dtensor_region import Region, leave, redistribute, running, summed
from meshplan.runtime.module import Around, Duties, install


def shard_parameters(
    model: nn.Module, plan: DTensorPlan, mesh: DeviceMesh
) -> dict[nn.Parameter, tuple[Placement, ...]]:
    """Replace every parameter by a DTensor on `mesh`, cut from this rank's full copy without a message; ties survive.

    Returns the placements of each new parameter while it is used.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    compute: dict[nn.Parameter, tuple[Placement, ...]] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in made:
                name = names[id(p)]
                made[id(p)] = _sharded(p, plan.params[name], mesh)
                compute[made[id(p)]] = placements(plan.compute[name])
            module._parameters[key] = made[id(p)]
    return compute


def placements(dims: tuple[int | None, ...]) -> tuple[Placement, ...]:
    """DTensor placements from the tensor dim that each mesh dim shards."""
    return tuple(Replicate() if d is None else Shard(d) for d in dims)


def _sharded(p: nn.Parameter, dims: tuple[int | None, ...], mesh: DeviceMesh) -> nn.Parameter:
    local: Tensor = p.detach()
    at = mesh.get_coordinate() or [0] * mesh.ndim
    for i, dim in enumerate(dims):
        if dim is not None:
            size, n = local.shape[dim], mesh.size(i)
            local = local.narrow(dim, chunk_offset(size, n, at[i]), chunk_sizes(size, n)[at[i]])
    local = local.contiguous() if local.is_meta else local.contiguous().clone()
    stride = torch.empty(p.shape, device="meta").stride()
    spread = DTensor.from_local(local, mesh, placements(dims), run_check=False, shape=p.shape, stride=stride)
    new = nn.Parameter(spread, requires_grad=p.requires_grad)
    for key, value in p.__dict__.items():
        setattr(new, key, value)
    return new


def install_regions(
    model: nn.Module, plan: DTensorPlan, mesh: DeviceMesh, streams: DropoutStreams | None, root: Around | None = None
) -> None:
    """Make `model` run as one DTensor region. `root` is called around the whole step, on local tensors."""
    compute = shard_parameters(model, plan, mesh)
    region = Region(mesh, compute, streams)
    recomputed = set(plan.core.bound.recompute_units)
    for path, module in model.named_modules():
        around = _boundaries(module, path, plan, region)
        if path in recomputed:
            around = _recomputed(around, region, streams)
        if path == "":
            around = _entrance(module, plan, region, around)
            around = _outside(root, around) if root is not None else around
        install(module, Duties(path, around=around, always=True), {}, False)


def _boundaries(module: nn.Module, path: str, plan: DTensorPlan, region: Region) -> Around:
    """A module's forward with what the plan declares of its inputs and outputs; what is partial is summed on its way
    out."""

    def around(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = compat.flatten((args, kwargs))
        keys = argument_keys(module, args, kwargs)
        leaves = [_placed(x, plan.declared(path, "input", k), region.mesh) for k, x in zip(keys, leaves, strict=True)]
        args, kwargs = compat.unflatten(leaves, structure)
        region.paths.append(path)
        try:
            out = run(*args, **kwargs)
        finally:
            region.paths.pop()
        keyed = compat.flatten_with_path(out)
        made = [_placed(x, plan.declared(path, "output", k), region.mesh) for k, x in keyed]
        return compat.unflatten(made, compat.flatten(out)[1])

    return around


def _placed(x: Any, declared: dict[int, user.Placement], mesh: DeviceMesh) -> Any:
    if isinstance(x, nn.Parameter) or not isinstance(x, Tensor):
        return x
    if not isinstance(x, DTensor):
        if not any(isinstance(p, user.Shard) for p in declared.values()):
            return x
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted: list[Placement] = []
    for i, have in enumerate(x.placements):
        place = declared.get(i)
        if isinstance(place, user.Shard):
            wanted.append(Shard(place.dim % x.dim()))
        elif isinstance(place, user.Replicate) or (have.is_partial() and place is None):
            wanted.append(Replicate())
        else:
            wanted.append(have)
    return redistribute(x, wanted) if tuple(wanted) != tuple(x.placements) else x


def _recomputed(inner: Around, region: Region, streams: DropoutStreams | None) -> Around:
    def around(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def again(*a: Any, **k: Any) -> Any:
            with running(region):  # backward, where the recompute happens, is outside the region
                return inner(run, a, k)

        contexts: dict[str, Any] = {"context_fn": streams.recompute_contexts} if streams is not None else {}
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs)

    return around


def _entrance(module: nn.Module, plan: DTensorPlan, region: Region, inner: Around) -> Around:
    def around(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = compat.flatten((args, kwargs))
        keys = argument_keys(module, args, kwargs)
        leaves = [_entered(x, k, plan, region.mesh) for k, x in zip(keys, leaves, strict=True)]
        args, kwargs = compat.unflatten(leaves, structure)
        with running(region):
            out = inner(run, args, kwargs)
            keyed = compat.flatten_with_path(out)
            made = [_out(x, plan.declared("", "output", k), plan) if isinstance(x, DTensor) else x for k, x in keyed]
        return compat.unflatten(made, compat.flatten(out)[1])

    return around


def _entered(x: Any, key: str, plan: DTensorPlan, mesh: DeviceMesh) -> Any:
    if not isinstance(x, Tensor):
        return x
    return DTensor.from_local(x, mesh, placements(plan.input(key, x.dim())), run_check=False)


def _out(x: DTensor, declared: dict[int, user.Placement], plan: DTensorPlan) -> Tensor:
    keep = [isinstance(declared.get(i), user.Shard) for i in range(len(plan.dims))]
    return leave(summed(x), plan.data, keep)


def _outside(root: Around, inner: Around) -> Around:
    return lambda run, args, kwargs: root(lambda *a, **k: inner(run, a, k), args, kwargs)
