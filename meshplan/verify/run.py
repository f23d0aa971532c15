"""`verify`: one plan on real gloo ranks against the single device, and the receipt of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.plan import Plan
from meshplan.verify.compare import (
    FLOOR,
    FLOORS,
    TOLERANCES,
    Worst,
    first_difference,
    first_unequal,
    missing_names,
    worst,
    worst_loss,
)
from meshplan.verify.composition import composition
from meshplan.verify.inputs import small_inputs
from meshplan.verify.job import Job, Loss, MakeOptimizer, adamw, comparable, resolve_factory
from meshplan.verify.pool import LocalPool
from meshplan.verify.rank import MakeProgram, RankReport, parallelized, run_rank
from meshplan.verify.receipt import Check, Receipt
from meshplan.verify.reference import Reference, fitted, run_reference
from meshplan.verify.shrink import shrunk

NEVER_CHECKED = (
    "GPUs and NCCL (ranks ran on CPUs over gloo)",
    "other shapes, and branches these inputs did not take",
    "speed and memory",
)


def verify(
    factory: Callable[[], nn.Module] | str,
    plan: Plan,
    nproc: int = 4,
    *,
    inputs: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    steps: int = 2,
    rtol: float | None = None,
    shrink: bool | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    model_name: str | None = None,
    timeout: float = 600.0,
    program: MakeProgram = parallelized,
    aligned: bool = False,
) -> Receipt:
    """Run the plan on `nproc` real processes and compare everything with the single-device program.

    Compared: the loss of each step; every gradient of the first step; every parameter after the last; replicas and
    inputs that must be equal, bit for bit; the collectives that happened with those that the comm graph lists, one by
    one; initial values drawn on the mesh. All parameters are made random first, since zeros and ones hide errors.
    Mixed precision and `torch.compile` are left out of the run, and the receipt says so.

    Arguments:
        factory: builds the single-device model; it and whatever else is passed here must be importable by the ranks (a
            function at the top level of a module). Or a name that `resolve_model` understands.
        plan: the plan; its mesh must fit `nproc`.
        nproc: number of processes; a running pool of this process is borrowed if it has that many ranks.
        inputs: global batch by input name, or a function that returns it; None makes one from the plan's shapes.
        seed: of parameters, batch and dropout.
        dtype: of parameters, buffers and floating inputs.
        steps: optimizer steps, at least 1.
        rtol: largest relative error that passes; None is 1e-9 in float64, 1e-5 in float32.
        shrink: verify a small relative of the model (`shrink_config`), with a small batch.
        loss: `(output, batch) -> 0-dim tensor` whose mean over the data ranks is the single-device loss; None takes the
            loss the model returns.
        optimizer: from parameters to an optimizer; None is AdamW(lr=1e-3, foreach=False) with an eps of 1e-6, times the
            largest gradient where that is larger than 1.
        model_name: for the receipt; None takes the factory's name.
        timeout: seconds the ranks may take.
        program: what makes the program under test; the default is meshplan.
        aligned: also run the program with all ranks simulated in one process and compare every call's values and
            gradients with one device's (`meshplan.verify.aligned`), which names the first call that is wrong.

    Returns:
        the receipt; `receipt.passed` is the verdict, and `receipt.raise_if_failed()` insists on it.

    Raises:
        PlanError: whatever the plan is refused for; `bad-value` for no steps or a dtype without tolerance; what
        `RankPool.run` raises if a rank hangs or dies. Any exception of the user's own model on a rank.
    """
    if steps < 1:
        raise PlanError(f"verify compares at least one step, not {steps}", code="bad-value", legal="steps >= 1")
    if rtol is None and dtype not in TOLERANCES:
        raise PlanError(f"no tolerance is known for {dtype}", code="bad-value", legal="rtol=, or torch.float64")
    name = model_name or _name(factory)
    plan, notes = comparable(plan)
    job = Job(factory, plan, nproc, inputs, seed, dtype, steps, loss, optimizer or adamw)
    spec = job.spec  # refuses a mesh that does not fit before anything is started
    if shrink:
        plan = replace(plan, inputs=small_inputs(plan.inputs, spec)) if inputs is None else plan
        job = replace(job, factory=shrunk(factory), plan=plan)
        notes += ("the model at its true size (a small relative was verified)",)
    with LocalPool(nproc, timeout=timeout) as pool, tempfile.TemporaryDirectory(prefix="meshplan-") as folder:
        path = os.path.join(folder, "reference.pt")
        reference: Reference = pool.run(run_reference, job, path, world=1, timeout=timeout)[0]
        job = fitted(job, reference.gradient_sizes)
        reports: list[RankReport] = pool.run(run_rank, job, path, program, world=nproc, timeout=timeout)
    if any(report.predicted is None for report in reports):
        notes += ("collectives: this program's are not predicted",)
    if reference.initialiser is not None:
        notes += (f"initial values ({reference.initialiser})",)
    if reference.masked:
        notes += (
            "gradients of flex_attention, which torch does not have on CPUs (one device attended under the same mask as a "
            "tensor; its losses are flex_attention's own)",
        )
    compared = checks(job, reference, reports, TOLERANCES[dtype] if rtol is None else rtol)
    if aligned:
        compared += (_aligned(job),)
    return Receipt(
        model=name,
        composition=composition(plan, spec),
        mesh=dict(spec.axes),
        world_size=nproc,
        dtype=str(dtype).removeprefix("torch."),
        seed=seed,
        steps=steps,
        inputs=reference.inputs,
        device="cpu, gloo",
        versions=_versions(),
        checks=compared,
        not_checked=NEVER_CHECKED + notes,
    )


def _aligned(job: Job) -> Check:
    """Every call of the program on simulated ranks, in float64, beside one device."""
    from meshplan.verify.aligned import RTOL, align

    given = job.inputs() if callable(job.inputs) else job.inputs
    try:
        found = align(resolve_factory(job.factory)(), job.plan, job.world, given, job.seed)
    except PlanError as error:
        if error.code not in ("not-aligned", "ranks-apart"):
            raise
        return Check("calls", False, str(error).splitlines()[0])
    return Check("calls", True, f"{found.calls} calls and {found.gradients} gradients", found.distance, RTOL)


def checks(job: Job, reference: Reference, reports: Sequence[RankReport], rtol: float) -> tuple[Check, ...]:
    """All comparisons of a verification, given what one device and every rank reported."""
    by_rank = dict(enumerate(reports))
    sizes = reference.parameter_sizes
    names = missing_names(sizes, [r.parameters for r in reports])
    found = [
        _close("loss", worst_loss(reference.losses, {r: report.losses for r, report in by_rank.items()}), rtol),
        _close("gradients", _worst_of([r.gradients for r in reports], reference.gradient_sizes, job.dtype), rtol),
        _close("parameters", _worst_of([r.parameters for r in reports], sizes, job.dtype), rtol),
    ]
    if names:
        found[2] = Check("parameters", False, f"names differ from one device: {', '.join(names)}")
    unequal = first_unequal({r: report.shards for r, report in by_rank.items()})
    found.append(Check("replicas", unequal is None, unequal or f"{_copies(reports)} bit for bit"))
    unequal = first_unequal({r: report.inputs for r, report in by_rank.items()})
    found.append(Check("inputs", unequal is None, unequal or "equal where they must be"))
    if all(r.predicted is not None for r in reports):
        found.append(_collectives(job, by_rank))
    if any(r.initial for r in reports):
        drawn = _worst_of([r.initial for r in reports], sizes, job.dtype)
        found.append(Check("initialisation", drawn.error == 0.0, drawn.name or "", drawn.error, 0.0))
    return tuple(found)


def _collectives(job: Job, reports: Mapping[int, RankReport]) -> Check:
    for rank, report in reports.items():
        for step, recorded in enumerate(report.recorded):
            difference = first_difference(report.predicted or [], recorded, job.spec, rank)
            if difference is not None:
                return Check("collectives", False, f"step {step}, {difference}")
    total = {len(recorded) for report in reports.values() for recorded in report.recorded}
    counts = " to ".join(str(n) for n in sorted({min(total), max(total)}))
    return Check("collectives", True, f"{counts} a step and rank, as predicted, one by one")


def _close(name: str, found: Worst, rtol: float) -> Check:
    return Check(name, found.error <= rtol, found.name or "", found.error, rtol)


def _worst_of(by_rank: Sequence[Mapping[str, float]], sizes: Mapping[str, float], dtype: torch.dtype) -> Worst:
    everything: dict[str, float] = {}
    for distances in by_rank:
        for name, apart in distances.items():
            everything[name] = max(apart, everything.get(name, 0.0))
    return worst(everything, sizes, FLOORS.get(dtype, FLOOR))


def _copies(reports: Sequence[RankReport]) -> str:
    shards = sum(len(r.shards) for r in reports)
    distinct = len({key for r in reports for key in r.shards})
    return f"{shards - distinct} copies of {distinct} shards equal"


def _name(factory: Callable[[], nn.Module] | str) -> str:
    return factory if isinstance(factory, str) else getattr(factory, "__qualname__", type(factory).__name__)


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("meshplan")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        own = "source tree"
    return {"python": platform.python_version(), "torch": torch.__version__, "meshplan": own}
