"""Puts FSDP2 on a model: units from the inside out, parameters cut where they waste least, gradients averaged exactly.

What torch's `fully_shard` leaves to its caller, and is done here:

- tied weights: an inner unit leaves a parameter alone that an enclosing unit holds too;
- the dim of each cut, so that a (1, n) parameter is not padded to as many rows as there are ranks;
- axis roles: a 2-D mesh means replicas x shards and nothing else, and must say so by its axis names;
- a forward without gradients frees every unit afterwards. FSDP2 keeps the root (and under zero1 and zero2 all units)
  gathered, so that an optimizer step after an evaluation would not reach the next forward, and `model.parameters()`
  would list gathered copies;
- accumulation over microbatches with any pattern of parameter use: see `fsdp_accumulation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshplan import compat
from meshplan.compiler.fsdp_schedule import FsdpPolicy, FsdpUnit, Strategy, reduce_calls
from meshplan.compiler.fsdp_units import Reshard, ShardDimOf, fsdp_units, owned_parameters
from meshplan.errors import PlanError
from meshplan.lowering.fsdp_accumulation import Sharded, accumulate

__all__ = ["accumulate", "apply_fsdp"]


def apply_fsdp(
    model: nn.Module,
    units: Sequence[str],
    mesh: DeviceMesh,
    *,
    strategy: str = "zero3",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    reshard_after_forward: Reshard = None,
    shard_dim_of: ShardDimOf | None = None,
    gradient_divide_factor: float | None = None,
    whole: frozenset[str] = frozenset(),
    lifted: frozenset[str] | None = None,
    experts: Mapping[str, DeviceMesh] | None = None,
    divisor: float | None = None,
) -> nn.Module:
    """Shard `model`'s parameters, in place, and return it.

    Arguments:
        units: paths of the modules gathered on their own; the root takes every parameter outside them. The order does
            not matter.
        mesh: 1-D (shards), or 2-D with axes ("dp_replicate", any name): replicas x shards. Parameters may already be
            DTensors on other axes of the same root mesh.
        strategy: zero3, zero2 or zero1; see `FsdpPolicy`.
        param_dtype: dtype of parameters (and floating inputs of units) while computing; None leaves them.
        reduce_dtype: dtype gradients are reduced and accumulated in; None: the gradient's own.
        output_dtype: dtype of the model's floating outputs; None leaves them.
        reshard_after_forward: overrides the strategy for units, all of them or by path. The root stays gathered.
        shard_dim_of: parameter -> dim to cut it along, None for the choice of `fsdp_units.shard_dim`.
        gradient_divide_factor: what summed gradients are divided by; None: the number of data ranks, which gives the
            mean also when there is one shard and several replicas.
        whole: names of parameters that are not cut. They become DTensors replicated on the mesh of the others, so that
            optimizers meet one mesh; averaging their gradients is left to the caller.
        lifted: those of `whole` for which that is so, None for all; the others lie on a mesh of their own already.
        experts: units whose parameters are sharded over another mesh, by path. Their inputs are not cast: weights of a routing
            keep their dtype.
        divisor: what their summed gradients are divided by.

    Raises:
        PlanError, before anything is changed: `bad-fsdp-strategy`, `mesh-not-replicate-by-shard`, `bad-reshard`,
        `bad-shard-dim`, `fsdp-mixed-dtypes`, and those of `owned_parameters`. `fsdp-refused` for what torch itself
        refuses.
    """
    shard, replicate = _degrees(mesh)
    stage = _check(model, units, strategy, reshard_after_forward)
    owned = owned_parameters(model, units, whole)
    described = fsdp_units(
        model,
        units,
        shard=shard,
        strategy=stage,
        reshard_after_forward=reshard_after_forward,
        shard_dim_of=shard_dim_of,
        whole=whole,
    )
    meshes = experts or {}
    ranks = {path: _degrees(own)[0] for path, own in meshes.items()}
    described = tuple(replace(unit, shard=ranks.get(unit.path, 0)) for unit in described)
    policy = FsdpPolicy(stage, shard, replicate, param_dtype, reduce_dtype)
    for unit in described:
        _check_shard_dims(unit, unit.shard or shard)
        reduce_calls(unit, policy)
    dims = {p.name: p.shard_dim for unit in described for p in unit.params}
    dim_of = {param: dims[name] for unit in owned for name, param in unit.params}
    for own, unit in zip(reversed(owned), reversed(described), strict=True):
        mine = unit.path in meshes
        precision = MixedPrecisionPolicy(
            param_dtype, reduce_dtype, output_dtype if unit.is_root else None, cast_forward_inputs=not mine
        )
        _fully_shard(
            own.module,
            unit.path,
            mesh=meshes.get(unit.path, mesh),
            # torch decides on the root itself (it stays gathered) when nothing is said.
            reshard_after_forward=None if unit.is_root and stage == "zero3" else unit.reshard_after_forward,
            shard_placement_fn=lambda p: Shard(dim_of[p]),
            mp_policy=precision,
            ignored_params=set(own.foreign) or None,
        )
        _divide_by(own.module, divisor if mine else gradient_divide_factor, unit.shard or shard, replicate or 1)
    _lift(model, whole if lifted is None else whole & lifted, mesh)
    modules = [own.module for own in owned]
    sharded = Sharded(model, [g for m in modules if (g := compat.fsdp_group(m)) is not None], stage)
    sharded.install()
    _free_after_eval(model, modules, sharded.groups)
    return model


def _lift(model: nn.Module, whole: frozenset[str], mesh: DeviceMesh) -> None:
    """Replace the parameters named `whole` by DTensors replicated over `mesh`; ties survive, nothing is communicated."""
    lifted = {id(p): _replicated(p, mesh) for name, p in model.named_parameters() if name in whole}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) in lifted:
                module._parameters[name] = lifted[id(p)]


def _replicated(p: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    local: Any = p.detach()
    placements: list[Any] = [Replicate()] * mesh.ndim
    if isinstance(local, DTensor):
        mesh, placements = compat.concatenate_meshes([mesh, local.device_mesh]), [*placements, *local.placements]
        local = local.to_local()
    spread = DTensor.from_local(local, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
    new = nn.Parameter(spread, requires_grad=p.requires_grad)
    new.__dict__.update({key: value for key, value in p.__dict__.items() if key not in new.__dict__})
    return new


def _degrees(mesh: DeviceMesh) -> tuple[int, int | None]:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh.size(0), None
    if mesh.ndim == 2 and names[:1] == ("dp_replicate",):
        return mesh.size(1), mesh.size(0)
    raise PlanError(
        f"a mesh of axes {names or mesh.ndim} is not replicas x shards; fsdp would read its first axis as replicas and "
        "leave memory unsharded over it",
        code="mesh-not-replicate-by-shard",
        legal='one axis (flatten several: mesh["dp_shard", "cp"]._flatten("dp_shard_cp")), or ("dp_replicate", shards)',
    )


def _check(model: nn.Module, units: Sequence[str], strategy: str, reshard: Reshard) -> Strategy:
    if strategy not in ("zero1", "zero2", "zero3"):
        raise PlanError(
            f"{strategy!r} is no fsdp strategy that shards", code="bad-fsdp-strategy", legal=["zero1", "zero2", "zero3"]
        )
    by_path = reshard if isinstance(reshard, Mapping) else dict.fromkeys(units, bool(reshard))
    plain = isinstance(reshard, Mapping | bool | None)
    if not plain or any(path not in units or not isinstance(value, bool) for path, value in by_path.items()):
        raise PlanError(
            f"reshard_after_forward {reshard!r} is not true or false for each unit",
            code="bad-reshard",
            legal=["true", "false", f"a mapping of {sorted(units)} to these"],
        )
    if getattr(model, "_meshplan_fsdp", None) is not None:
        raise PlanError("fsdp is already applied to this model", code="fsdp-refused", legal="apply it once")
    return cast(Strategy, strategy)


def _check_shard_dims(unit: FsdpUnit, shard: int) -> None:
    for p in unit.params:
        if p.shard_dim >= len(p.local_shape) or (p.shard_dim != 0 and p.local_shape[p.shard_dim] % shard):
            even = [d for d, size in enumerate(p.local_shape) if size % shard == 0]
            raise PlanError(
                f"{p.name} of local shape {p.local_shape} cannot be cut along dim {p.shard_dim} over {shard} ranks",
                code="bad-shard-dim",
                module=p.name.rpartition(".")[0],
                legal=f"dim {', '.join(map(str, even))}" if 0 in even else f"dims {[0, *even]} (0 is padded)",
            )


def _fully_shard(module: nn.Module, path: str, **kwargs: Any) -> None:
    try:
        fully_shard(module, **kwargs)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise PlanError(f"fully_shard refuses {path!r}: {error}", code="fsdp-refused", module=path) from error


def _divide_by(module: Any, factor: float | None, shard: int, replicate: int) -> None:
    if factor is None:
        return
    if shard > 1:
        # Sums on the wire, one division after: a pre-multiplying sum exists only in NCCL.
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)
    elif compat.fsdp_group(module) is not None:
        # With one shard rank torch divides twice by its factor in some dtypes; correct the mean instead.
        ratio = replicate / factor
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(ratio))


def _free_after_eval(model: nn.Module, modules: list[nn.Module], groups: list[Any]) -> None:
    mark = 0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal mark
        mark = compat.fsdp_forward_mark(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in modules:
                unit.reshard()  # type: ignore[operator]
            compat.fsdp_forget_forwards(module, groups, mark)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
