"""A whole lowered program with all its ranks simulated in this process, call by call beside the single device.

The third net: real numbers in float64, every result of every rank put together by the layout the compiler claims for it
and compared with what one device got at the same call; then the gradient of every result, and of every parameter. What
runs is the runtime itself (boundaries, views, edits, operators) over groups of threads. Where FSDP would gather and
reduce parameters, ranks hold them whole, and their gradients are summands over the data axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshplan.compiler.kinds import I, Kind, N, R
from meshplan.compiler.lowered import Core
from meshplan.compiler.pieces import tolerance
from meshplan.compiler.uses import Decided
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.plan import Plan
from meshplan.runtime.simulated import SimulatedGroups, World
from meshplan.verify.inputs import make_batch
from meshplan.verify.job import in_dtype
from meshplan.verify.layouts import distance, infer, nested, show, take
from meshplan.verify.simulate import Run, axes_of, cores_of, randomised, run_rank, run_single

RTOL = 1e-9
SMALL = 1e-6


@dataclass(frozen=True)
class Aligned:
    """What was compared: calls, gradients of results, gradients of parameters; and the largest relative distance."""

    calls: int
    gradients: int
    parameters: int
    distance: float


def align(
    model: nn.Module,
    plan: Plan,
    world_size: int,
    inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    tamper: Callable[[Core], Core] | None = None,
    check: str = "off",
) -> Aligned:
    """Run the program of `plan` on `world_size` simulated ranks beside one device, with random parameters.

    Arguments:
        model: the single-device model, unchanged; on meta it is materialised in a copy.
        inputs: a global batch by name; None makes one from the plan, with unequal ignored labels a data rank.
        seed: of parameters, batch, cotangents and dropout.
        check: of rules by value before the program runs, as in `meshplan.lower`; what they say is compared anyway.
        tamper: applied to each rank's program before it runs; for showing that faults are found.

    Raises PlanError: `not-aligned` at the first call whose results no layout explains, or another one than the claimed,
    with the user's line; the same for gradients, last call first, and for parameters; `ranks-apart`; what lowering
    raises.
    """
    spec = MeshSpec.resolve(plan.mesh, world_size)
    single = randomised(model, seed)
    batch = in_dtype(make_batch(plan.inputs, spec, single, seed) if inputs is None else inputs, torch.float64)
    cores = cores_of(single, plan, spec, batch, world_size, check)
    spared = set(cores[0].program.spared)
    claims = {d.call.index - sum(i < d.call.index for i in spared): d for d in cores[0].program.decided}
    if tamper is not None:
        cores = [tamper(core) for core in cores]
    spec, axes = cores[0].spec, cores[0].program.axes
    one, cotangents = run_single(single, batch, seed, plan)
    one.log.entries[:] = [e for i, e in enumerate(one.log.entries) if i not in spared]
    world = World(world_size)

    def work(rank: int) -> Run:
        return run_rank(single, cores[rank], batch, cotangents, SimulatedGroups(spec, rank, world=world), seed)

    ranks = world.run(work)
    return _Comparison(one, ranks, claims, cores[0], axes, spec).run()


ORDERED = {"sort", "topk", "max", "min", "kthvalue", "median", "cummax", "cummin", "mode"}
"""Calls that return values and where they were."""


class _Comparison:
    """Ranks against one device: results in program order, then gradients backwards, then parameters."""

    def __init__(
        self,
        one: Run,
        ranks: list[Run],
        claims: Mapping[int, Decided],
        core: Core,
        axes: tuple[str, ...],
        spec: MeshSpec,
    ) -> None:
        self.one, self.ranks, self.claims, self.core, self.axes, self.spec = one, ranks, claims, core, axes, spec
        self.worst = 0.0
        # Whatever a program computes in float32 leaves what follows no more exact than that.
        self.allowed = [RTOL]
        for entry in one.log.entries:
            floating = [tolerance(o) for o in entry.outs if o.is_floating_point()]
            self.allowed.append(max([self.allowed[-1], *floating]))
        # A gradient that is truly zero (a key's bias under softmax) is rounding noise of the others.
        largest = max((g.abs().max().item() for g in one.grads.values() if g.numel()), default=1.0)
        self.floor = SMALL * (largest or 1.0)

    def run(self) -> Aligned:
        entries = self.one.log.entries
        for r, ran in enumerate(self.ranks):
            names = [e.name for e in ran.log.entries]
            if names != [e.name for e in entries]:
                wanted = [e.name for e in entries]
                at = next(
                    (i for i, (a, b) in enumerate(zip(names, wanted, strict=False)) if a != b),
                    min(len(names), len(wanted)),
                )
                raise PlanError(
                    f"rank {r} calls {', '.join(names[at : at + 3]) or 'nothing'} where one device calls "
                    f"{', '.join(wanted[at : at + 3]) or 'nothing'} (call {at})", code="not-aligned",
                )  # fmt: skip
        for i in range(len(entries)):
            self._results(i)
        gradients = sum(self._gradients(i) for i in reversed(range(len(entries))))
        for name in self.one.grads:
            self._parameter(name)
        return Aligned(len(entries), gradients, len(self.one.grads), self.worst)

    def _results(self, i: int) -> None:
        for k, want in enumerate(self.one.log.entries[i].outs):
            kinds = self._claimed(i, k)
            entry = self.one.log.entries[i]
            # Which of values that are equal but for rounding comes first is up to that; the values themselves are compared.
            places = entry.name in ORDERED and not want.is_floating_point() and entry.outs[0].is_floating_point()
            if entry.unset or places:
                continue
            values = [r.log.entries[i].outs[k] for r in self.ranks]
            apart_by = distance(values, kinds, self.axes, self.spec, want, floor=SMALL)
            if apart_by > self.allowed[i + 1]:
                found = infer(values, self.axes, self.spec, want)
                explained = f"they are {show(found, self.axes)}" if found else "no layout explains them"
                raise self._error(i, f"its values are not {show(kinds, self.axes)} as claimed: {explained}", apart_by)
            self.worst = max(self.worst, apart_by)

    def _gradients(self, i: int) -> int:
        checked = 0
        entry = self.one.log.entries[i]
        for k, want in entry.grads.items():
            parts = [r.log.entries[i] for r in self.ranks]
            call = self.claims.get(i)
            if any(k in e.handed for e in parts) or (call and (call.call.index, k) in self.core.program.merged):
                continue
            kinds = self._claimed(i, k)
            checked += 1
            values = [e.grads.get(k, torch.zeros_like(e.outs[k])) for e in parts]
            apart_by = distance(values, kinds, self.axes, self.spec, want, floor=self.floor, gradient=True)
            self.worst = max(self.worst, apart_by)
            if apart_by > self.allowed[-1]:
                raise self._error(i, f"the gradient of its result does not fit {show(kinds, self.axes)}", apart_by)
        return checked

    def _parameter(self, name: str) -> None:
        plan, want = self.core.params[name], self.one.grads[name]
        shards = dict(plan.shards)
        axes = axes_of(self.core, plan)
        kinds: list[Kind] = [shards.get(a, R if a in plan.reduce else I) for a in axes]
        shapes = [p.grads.get(name) for p in self.ranks]
        local = [take(want, kinds, axes, self.spec, r) for r in range(len(self.ranks))]
        values = [torch.zeros_like(like) if g is None else g for g, like in zip(shapes, local, strict=True)]
        apart_by = distance(values, kinds, axes, self.spec, want, floor=self.floor, gradient=True)
        if apart_by > self.allowed[-1]:
            raise PlanError(
                f"the gradient of {name} does not fit {show(kinds, axes)} as declared, "
                f"relative distance {apart_by:.1e}",
                code="not-aligned", module=name.rpartition(".")[0],
            )  # fmt: skip
        self.worst = max(self.worst, apart_by)

    def _claimed(self, i: int, k: int) -> tuple[Kind, ...]:
        """The layout of result `k` of call `i`; replicated where the call was found to be a constant."""
        found = self.claims.get(i)
        return (N,) * len(self.axes) if found is None else nested(found.outs[k], self.axes, self.spec)

    def _error(self, i: int, what: str, apart_by: float) -> PlanError:
        found = self.claims.get(i)
        call = found.call if found else None
        return PlanError(
            f"{self.one.log.entries[i].name} on simulated ranks differs from one device: {what}, "
            f"relative distance {apart_by:.1e}",
            code="not-aligned", where=call.where if call else None, module=call.module if call else None,
        )  # fmt: skip
