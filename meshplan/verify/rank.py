"""What each rank does: parallelise, run the same steps, and measure its own distance from the one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan.compat import full_tensor, quiet_redistribution
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.runtime.init import init_weights
from meshplan.runtime.recorder import Collective, record_collectives
from meshplan.verify.compare import distance
from meshplan.verify.job import Batch, Job, build, find_loss, in_dtype
from meshplan.verify.reference import digest, named_parameters


@dataclass(frozen=True)
class Program:
    """A parallelised model as verification needs it.

    Attributes:
        model: the module, ready to train.
        shard: from the global batch to this rank's part.
        predicted: the collectives of a step as `low.to_json()["collectives"]`, or None where they are not predicted;
            called after the last step.
    """

    model: nn.Module
    shard: Callable[[Batch], Batch]
    predicted: Callable[[], list[dict[str, Any]] | None]


MakeProgram = Callable[[nn.Module, Plan, Batch], Program]


@dataclass(frozen=True)
class RankReport:
    """What one rank saw.

    Attributes:
        losses: of each step; None where this rank has none (an inner pipeline stage).
        gradients, parameters, initial: largest absolute distance from the one device by parameter name.
        shards: hash of each local shard, by parameter name and which part of the whole it is.
        inputs: hash of each local input, by name and the coordinates it may depend on.
        predicted: the collectives of one step, as the comm graph lists them; None where it lists none.
        recorded: the collectives of each step, as they happened.
    """

    losses: tuple[float | None, ...]
    gradients: dict[str, float]
    parameters: dict[str, float]
    initial: dict[str, float]
    shards: dict[tuple[str, str], str]
    inputs: dict[tuple[str, str], str]
    predicted: list[dict[str, Any]] | None
    recorded: tuple[tuple[Collective, ...], ...]


def parallelized(model: nn.Module, plan: Plan, batch: Batch, seed: int = 0) -> Program:
    """The program under test: meshplan's own. `batch` is global and gives the input shapes; `seed` is that of dropout."""
    # The package's top level imports verification, which therefore cannot import it back while it loads.
    mp: Any = importlib.import_module("meshplan")
    model = mp.parallelize(model, plan, inputs=batch, seed=seed)
    return Program(
        model,
        shard=lambda batch: mp.shard_batch(model, batch),
        predicted=lambda: low.to_json()["collectives"] if (low := mp.lowered(model)).predicted else None,
    )


def run_rank(job: Job, path: str, program: MakeProgram = parallelized) -> RankReport:
    """Run `job` on this rank against the reference saved at `path`.

    Raises PlanError `inputs-differ` if this rank was given another global batch than the reference, and what
    `parallelize` raises.
    """
    rank = dist.get_rank()
    reference = torch.load(path, mmap=True, weights_only=True)
    batch = _same_batch(job, reference["batch"], rank)
    own = {"seed": job.seed} if program is parallelized else {}
    made = program(build(job), job.plan, batch, **own)
    model = made.model
    optimizer = job.optimizer(model.parameters())
    local = made.shard(batch)
    losses: list[float | None] = []
    recorded: list[tuple[Collective, ...]] = []
    gradients: dict[str, float] = {}
    for step in range(job.steps):
        optimizer.zero_grad()
        with record_collectives() as log:
            loss = _forward_backward(job, model, local)
        losses.append(None if loss is None else loss.detach().item())
        if step == 0:
            grads = {name: p.grad for name, p in named_parameters(model).items()}
            gradients = _distances(grads, reference["gradients"], reference["parameters"])
        with record_collectives() as stepped:
            stepped.phase("optimizer")
            optimizer.step()
        recorded.append((*log, *stepped))
    parameters = _distances(named_parameters(model), reference["parameters"], reference["parameters"])
    shards = {(name, part(p)): digest(_local(p)) for name, p in named_parameters(model).items()}
    initial = {}
    if reference["initial"] and set(parameters) <= set(reference["initial"]):
        init_weights(model, job.seed)
        initial = _distances(named_parameters(model), reference["initial"], reference["parameters"])
    return RankReport(
        losses=tuple(losses),
        gradients=gradients,
        parameters=parameters,
        initial=initial,
        shards=shards,
        inputs=_input_hashes(local, job, rank),
        predicted=made.predicted(),
        recorded=tuple(recorded),
    )


def _same_batch(job: Job, reference: Batch, rank: int) -> Batch:
    if not callable(job.inputs):
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in reference.items()}
    batch = in_dtype(job.inputs(), job.dtype)
    differ = [n for n in {**reference, **batch} if digest(batch.get(n)) != digest(reference.get(n))]
    if differ:
        raise PlanError(
            f"rank {rank} was given another global batch than one device: {', '.join(differ)} differ",
            code="inputs-differ",
            legal="inputs= returns the same global batch wherever it is called; shard_batch cuts each rank's part",
        )
    return batch


def _forward_backward(job: Job, model: nn.Module, local: Batch) -> Tensor | None:
    output = model(**local)
    if output is None:  # a pipeline stage before the last
        return None
    loss = (job.loss or find_loss)(output, local)
    if loss.requires_grad:  # a pipeline's schedule has been backward already
        loss.backward()
    return loss


def _distances(got: dict[str, Any], want: dict[str, Tensor], shapes: dict[str, Tensor]) -> dict[str, float]:
    """Distance by name, gathering each DTensor in turn (every rank of a mesh in the same order). A missing tensor is
    zero: so is an idle expert's gradient, and a step of AdamW tells the two apart."""
    out = {}
    for name, x in got.items():
        if name not in shapes:
            out[name] = float("inf")
            continue
        zero = torch.zeros_like(shapes[name])
        out[name] = distance(zero if x is None else _full(x), want.get(name, zero))
    return out


@torch.no_grad()
def _full(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.detach()
    with quiet_redistribution():
        return full_tensor(x)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def part(x: Tensor) -> str:
    """Which part of the whole tensor this rank holds: its coordinates on the axes that shard it. Ranks that agree in it
    hold replicas."""
    if not isinstance(x, DTensor):
        return ""
    names = x.device_mesh.mesh_dim_names or tuple(map(str, range(x.device_mesh.ndim)))
    at: Sequence[int] = x.device_mesh.get_coordinate() or ()
    return ", ".join(f"{n} {i}" for n, i, p in zip(names, at, x.placements, strict=False) if not p.is_replicate())


def _input_hashes(local: Batch, job: Job, rank: int) -> dict[tuple[str, str], str]:
    """Hashes by what an input may depend on: the axes its place shards. Inputs that the plan does not declare (ids
    that `shard_batch` adds) may depend on every data axis."""
    spec: MeshSpec = job.spec
    out = {}
    for name, x in local.items():
        item = job.plan.inputs.get(name)
        axes = [a for a, p in item.place.items() if isinstance(p, Shard)] if item else ["dp", "cp"]
        where = ", ".join(f"{axis} {spec.coord(rank, axis)}" for axis in axes if spec.degree(axis) > 1)
        out[name, where] = digest(x)
    return out
