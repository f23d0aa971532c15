"""One model on one device and on simulated ranks: random parameters, every call logged, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.compile import compile_core
from meshplan.compiler.kinds import Kind, N
from meshplan.compiler.lowered import Core, ParamPlan
from meshplan.compiler.pieces import random
from meshplan.compiler.uses import settled
from meshplan.errors import PlanError
from meshplan.lowering.recompute import recompute_arounds
from meshplan.lowering.tensor import bind_program
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.streams import stream_key
from meshplan.ops.attention.flex import taken_whole
from meshplan.ops.dropout import DropoutStreams
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.runtime.meta import materialise
from meshplan.runtime.module import in_step
from meshplan.runtime.simulated import SimulatedGroups
from meshplan.verify.dropout import single_device_dropout
from meshplan.verify.layouts import take, take_gradient
from meshplan.verify.payload import single_device_payload
from meshplan.verify.watching import Log, Values, watch


@dataclass(frozen=True)
class Run:
    """One forward and backward: its calls, and the gradients of parameters by name, as autograd left them."""

    log: Log
    grads: dict[str, Tensor]


def randomised(model: nn.Module, seed: int) -> nn.Module:
    """A float64 copy with every parameter random: zeros and ones would hide errors."""
    made = copy.deepcopy(model)
    if any(p.is_meta for p in made.parameters()):
        materialise(made, "cpu")
    made = made.double()
    with torch.no_grad():
        for name, p in made.named_parameters():
            generator = torch.Generator().manual_seed(stream_key(seed, "aligned", name))
            p.copy_(0.3 * random(p.shape, p.dtype, generator) + (0.5 if p.dim() == 1 else 0.0))
    return made


def cores_of(
    model: nn.Module, plan: Plan, spec: MeshSpec, batch: Mapping[str, Any], world: int, check: str = "off", fold: bool = False
) -> list[Core]:
    """The program of each rank; one for all where every split is even.

    Raises PlanError `ranks-differ`, as `parallelize` does, where the ranks would not meet in the same collectives."""
    first = compile_core(model, plan, spec, batch, 0, check=check, fold=fold)
    if not _uneven(first):
        return [first] * world
    cores = [first, *(compile_core(model, plan, spec, batch, r, check="off", fold=fold) for r in range(1, world))]
    wanted = first.facts()
    for rank, core in enumerate(cores[1:], 1):
        apart = [name for name, fact in core.facts().items() if fact != wanted[name]]
        if apart:
            raise PlanError(
                f"the ranks are about to run different programs: ranks 0 and {rank} differ in {', '.join(apart)}",
                code="ranks-differ", legal="sizes of which every rank has a part",
            )  # fmt: skip
    return cores


def _uneven(core: Core) -> bool:
    degrees = [core.spec.degree(axis) for axis in core.program.axes]
    moved = [(b.move.size, core.spec.degree(b.move.axis)) for b in core.program.boundaries]
    moved += [(p.shape[s.dim], core.spec.degree(axis)) for p in core.params.values() for axis, s in p.shards]
    placed = [
        (leaf.shape[kind.dim], n)
        for example in core.examples.values() for leaf in example.leaves if leaf.shape
        for kind, n in zip(leaf.kinds, degrees, strict=True) if isinstance(kind, Shard)
    ]  # fmt: skip
    return any(size % n for size, n in moved + placed)


def run_single(
    model: nn.Module, batch: Mapping[str, Any], seed: int, plan: Plan | None = None
) -> tuple[Run, list[Tensor | None]]:
    """Forward and backward of one device from random gradients of its results, which are returned too. `model` is
    unchanged: what a forward leaves in attributes stays in a copy."""
    log, inputs, model = Log(), _copied(batch), copy.deepcopy(model)
    with single_device_dropout(model, seed) as streams, single_device_payload(model, plan):
        streams.begin_step()
        # The values of a call are compared, so it is one call here as well.
        with Values(log), compat.taking_flex(taken_whole()):
            out = model(**inputs)
    log.open = False
    outs = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(stream_key(seed, "cotangents"))
    cotangents = [random(o.shape, o.dtype, generator) if o.requires_grad else None for o in outs]
    pulled = [(o, g) for o, g in zip(outs, cotangents, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in pulled], [g for _, g in pulled])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return Run(log, grads), cotangents


def run_rank(
    single: nn.Module,
    core: Core,
    batch: Mapping[str, Any],
    cotangents: Sequence[Tensor | None],
    groups: SimulatedGroups,
    seed: int,
) -> Run:
    """Forward and backward of one rank's program, with parameters cut out of `single`.

    Raises PlanError `not-aligned` where the rank's own code fails.
    """
    rank, spec, axes = groups.rank, core.spec, core.program.axes
    model, log, streams = local_model(single, core, rank), Log(), DropoutStreams(seed)
    arounds = recompute_arounds(core.bound, streams)
    inner = arounds.get("")
    arounds[""] = lambda run, args, kwargs: in_step(run if inner is None else lambda *a, **k: inner(run, a, k))(
        *args, **kwargs
    )
    bind_program(model, core, groups, streams, arounds, False)
    watch(model, log)
    streams.begin_step()
    local = {}
    for name, value in batch.items():
        leaves, structure = compat.flatten(value)
        kinds = [leaf.kinds for leaf in core.examples[name].leaves]
        cut = [take(x, k, axes, spec, rank) if isinstance(x, Tensor) else x for x, k in zip(leaves, kinds, strict=True)]
        local[name] = compat.unflatten(cut, structure)
    try:
        out = model(**local)
        log.open = False
        _backward(out, cotangents, core, rank)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        where = f"after {log.entries[-1].name} (call {len(log.entries) - 1})" if log.entries else "in its first call"
        raise PlanError(
            f"simulated rank {rank} fails {where if log.open else 'in backward'}: {type(error).__name__}: {error}",
            code="not-aligned",
        ) from error
    return Run(log, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _backward(out: Any, cotangents: Sequence[Tensor | None], core: Core, rank: int) -> None:
    """Backward from every result that one device pulled on, with this rank's part of the same gradient."""
    outs = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor)]
    layouts = [tuple(map(settled, kinds)) for _, kinds, _, _ in core.program.outputs]
    pulled = [
        (o, take_gradient(g, kinds, core.program.axes, core.spec, rank))
        for o, g, kinds in zip(outs, cotangents, layouts, strict=True) if g is not None
    ]  # fmt: skip
    torch.autograd.backward([o for o, _ in pulled], [g for _, g in pulled])


def axes_of(core: Core, plan: ParamPlan) -> tuple[str, ...]:
    """The axes on which a parameter lies: those of the program, cut where experts are spread over a part of one."""
    axes = core.program.axes
    return tuple(leaf for a in axes for leaf in core.spec.leaves(a)) if plan.routed else axes


def local_model(single: nn.Module, core: Core, rank: int) -> nn.Module:
    """A copy that holds this rank's shards as plain parameters."""
    memo: dict[int, Any] = {}
    for name, p in single.named_parameters():
        plan = core.params[name]
        axes = axes_of(core, plan)
        shards = dict(plan.shards)
        kinds: list[Kind] = [shards.get(axis, N) for axis in axes]
        memo[id(p)] = nn.Parameter(take(p.detach(), kinds, axes, core.spec, rank), p.requires_grad)
    return copy.deepcopy(single, memo)


def _copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for name, value in batch.items():
        leaves, structure = compat.flatten(value)
        out[name] = compat.unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], structure)
    return out
