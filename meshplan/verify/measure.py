"""Times a parallelised model's steps on its ranks, beside the same model on one device and its hand-written peer."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan.compiler.lowered import Core
from meshplan.lowering.parallelize import parallelize
from meshplan.mesh.spec import MeshSpec
from meshplan.models.registry import resolve_model
from meshplan.plan.plan import Plan
from meshplan.runtime.batch import shard_batch
from meshplan.runtime.session import session_of
from meshplan.verify.inputs import make_batch, small_inputs
from meshplan.verify.job import find_loss
from meshplan.verify.peer import peer, refusal
from meshplan.verify.shrink import shrunk

ONE_DEVICE, PEER = "one device", "parallelize_module + fully_shard"
WARMUP = 2
SPARE = 0.5
"""Share of free memory that parameters, gradients and Adam's two moments of a whole model may take on one device."""


@dataclass(frozen=True)
class Task:
    """What to time. `model` is a name for `resolve_model`; `shrink` as in `verify`."""

    model: str
    plan: Plan
    steps: int
    seed: int = 0
    shrink: bool = False


@dataclass(frozen=True)
class Steps:
    """Measured steps of one program: medians over steps, of the slowest rank.

    Attributes:
        step_s: wall seconds of forward, backward and optimizer.
        host_s: seconds the host is busy in it. On CUDA: until the last kernel is queued. On the CPU: CPU time of the
            thread that runs the step, computation included.
        peak_bytes: of the rank that needs most, parameters and optimizer included; None where it cannot be told.
    """

    step_s: float
    host_s: float
    peak_bytes: int | None


@dataclass(frozen=True)
class AxisCost:
    """What one rank communicates over one axis in a step.

    Attributes:
        collectives, bytes: counted from the comm graph.
        seconds: measured, each collective alone on its group, none overlapped; None if some op is not timed.
    """

    axis: str
    collectives: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Measured:
    """Everything `measure` found out; `single` and `peer` are None where `why_not` says why (`ONE_DEVICE`, `PEER`).

    Attributes:
        tokens: elements of the first integer input, global: what a step trains on.
    """

    mesh: dict[str, int]
    device: str
    tokens: int
    ours: Steps
    single: Steps | None
    peer: Steps | None
    axes: tuple[AxisCost, ...]
    why_not: dict[str, str]


def measure(task: Task) -> Measured:
    """Run `task` on the default process group, of which every rank calls this; all return the same.

    The model's plan is applied first, then torch's own equivalent if there is one, then rank 0 runs the whole batch on
    one device while the others wait.

    Raises PlanError: what `parallelize` raises; `no-shape` for inputs without shapes; `no-loss`.
    """
    device = _device()
    factory, plan = resolve_model(task.model), task.plan
    spec = MeshSpec.resolve(plan.mesh, dist.get_world_size())
    if task.shrink:
        factory, plan = shrunk(factory), replace(plan, inputs=small_inputs(plan.inputs, spec))
    whole = {k: x.to(device) for k, x in make_batch(plan.inputs, spec, _built(factory, "meta"), task.seed).items()}

    ours, axes, core, batch = _lowered(factory, plan, whole, task, device)
    why_not: dict[str, str] = {}
    by_hand = _by_hand(factory, core, batch, task, device, why_not)
    single = _on_one_device(factory, whole, task, device, why_not)
    tokens = next((x.numel() for x in whole.values() if not x.is_floating_point()), 0)
    return Measured(dict(spec.axes), _called(device), tokens, ours, single, by_hand, axes, why_not)


def _lowered(
    factory: Callable[[], nn.Module], plan: Plan, whole: dict[str, Tensor], task: Task, device: torch.device
) -> tuple[Steps, tuple[AxisCost, ...], Core, dict[str, Tensor]]:
    # On CUDA the whole model may not fit the host: it is born on meta, and each rank fills in its part.
    model = parallelize(_built(factory, "meta" if device.type == "cuda" else "cpu", task.seed), plan, seed=task.seed)
    batch = shard_batch(model, whole)
    steps = _timed(_training_step(model, lambda: find_loss(model(**batch), batch).backward()), task.steps, device)
    return steps, _axes(model, device), session_of(model).core, batch


def _by_hand(
    factory: Callable[[], nn.Module],
    core: Core,
    batch: dict[str, Tensor],
    task: Task,
    device: torch.device,
    why_not: dict[str, str],
) -> Steps | None:
    reason = refusal(core)
    if reason is not None:
        why_not[PEER] = f"no equivalent of {reason}"
        return None
    made = peer(_built(factory, "cpu", task.seed), core, device.type)
    made.model.to(device)
    return _timed(_training_step(made.model, lambda: made.forward_backward(batch)), task.steps, device)


def _device() -> torch.device:
    if "nccl" in dist.get_backend() and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count())))
    return torch.device("cpu")


def _called(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {dist.get_backend()}"
    return f"cpu, {dist.get_backend()}, {os.cpu_count()} cores for all ranks"


def _built(factory: Callable[[], nn.Module], device: str, seed: int = 0) -> nn.Module:
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _training_step(model: nn.Module, forward_backward: Callable[[], Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        forward_backward()
        optimizer.step()

    return step


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters by their mesh: the fused loops of an optimizer do not mix meshes, nor DTensors with plain tensors."""
    found: dict[Any, list[Tensor]] = {}
    for p in model.parameters():
        found.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return [{"params": params} for params in found.values()]


def _timed(step: Callable[[], None], steps: int, device: torch.device, alone: bool = False) -> Steps:
    """Time `steps` steps after a warm-up; the slowest rank counts, unless this one runs `alone`."""
    gc.collect()
    _forget_peak(device)
    walls, hosts = [], []
    for i in range(WARMUP + steps):
        if not alone:
            dist.barrier()
        _synchronize(device)
        start, busy = time.perf_counter(), time.thread_time()
        step()
        host = time.perf_counter() - start if device.type == "cuda" else time.thread_time() - busy
        _synchronize(device)
        if i >= WARMUP:
            walls.append(time.perf_counter() - start)
            hosts.append(host)
    mine = Steps(statistics.median(walls), statistics.median(hosts), _peak(device))
    if alone:
        return mine
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    peaks = [s.peak_bytes for s in every if s.peak_bytes is not None]
    return Steps(max(s.step_s for s in every), max(s.host_s for s in every), max(peaks, default=None))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak of resident memory
    except OSError:
        return


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), None)


def _on_one_device(
    factory: Callable[[], nn.Module],
    whole: dict[str, Tensor],
    task: Task,
    device: torch.device,
    why_not: dict[str, str],
) -> Steps | None:
    """Rank 0's steps on the global batch, told to all; None, and why in `why_not`, if the model does not fit."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        needed = 4 * sum(p.numel() * p.element_size() for p in _built(factory, "meta").parameters())
        free = _free(device)
        if needed > SPARE * free:
            answer[1] = f"does not fit: parameters, gradients and optimizer take {needed:,} bytes, {free:,} are free"
        else:
            model = _built(factory, "cpu", task.seed).to(device)
            try:
                step = _training_step(model, lambda: find_loss(model(**whole), whole).backward())
                answer[0] = _timed(step, task.steps, device, alone=True)
            except torch.OutOfMemoryError:
                answer[1] = "does not fit: out of memory in the step"
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        why_not[ONE_DEVICE] = answer[1]
    return answer[0]


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


TIMED = ("all_gather", "reduce_scatter", "all_reduce")


def _axes(model: nn.Module, device: torch.device, repeats: int = 3) -> tuple[AxisCost, ...]:
    """Count the collectives of a step by axis, and time each distinct one alone, on all ranks at once."""
    session = session_of(model)
    groups, low = session.groups, session.lowered
    distinct = Counter((c.axis, c.op, c.elements, c.dtype) for c in low.collectives)
    seconds: dict[str, float] = {}
    for (axis, op, elements, dtype), count in distinct.items():
        if op not in TIMED:
            continue
        group = groups.group(*axis.split("+"))
        # The full tensor for a reduction; this rank's equal share of it (padding is in the count) for a gather.
        length = elements // group.size if op == "all_gather" else elements
        x = torch.zeros(length, dtype=getattr(torch, dtype), device=device)
        call, along = getattr(group, op), () if op == "all_reduce" else (0,)
        took = []
        for _ in range(1 + repeats):
            _synchronize(device)
            start = time.perf_counter()
            call(x, *along)
            _synchronize(device)
            took.append(time.perf_counter() - start)
        seconds[axis] = seconds.get(axis, 0.0) + count * statistics.median(took[1:])
    out = []
    for axis in dict.fromkeys(c.axis for c in low.collectives):
        mine = [c for c in low.collectives if c.axis == axis]
        whole = all(c.op in TIMED for c in mine)
        out.append(AxisCost(axis, len(mine), sum(c.bytes for c in mine), seconds.get(axis, 0.0) if whole else None))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [cost.seconds for cost in out])
    slowest = [None if None in each else max(each) for each in zip(*every, strict=True)]
    return tuple(replace(cost, seconds=s) for cost, s in zip(out, slowest, strict=True))
