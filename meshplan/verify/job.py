"""What is verified: the job that travels to every rank, and how a rank or the one device builds its model from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.streams import stream_key
from meshplan.models.registry import resolve_model
from meshplan.plan.plan import Plan
from meshplan.runtime.init import init_weights
from meshplan.runtime.meta import materialise

Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter], largest: float = 1.0) -> torch.optim.Optimizer:
    """AdamW without foreach (which refuses parameters on different meshes). `eps` stands well above the rounding noise of a
    gradient that is truly zero (a key's bias under softmax), which grows with the `largest` gradient: at 1e-8 AdamW would
    blow float32 noise up to a whole step."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6 * max(1.0, largest), foreach=False)


@dataclass(frozen=True)
class Job:
    """One verification, picklable.

    Attributes:
        factory: builds the user's single-device model; or a name `resolve_model` understands, where the factory
            itself could not travel.
        plan: the plan as it is run, and `world` the number of ranks.
        inputs: global batch, a function that returns it (called on every rank), or None to make one from the plan.
        seed: of the model, the batch and the dropout streams.
        dtype: of parameters, buffers and floating inputs.
        steps: optimizer steps.
        loss: from the model's output and the (local) batch to a 0-dim tensor; None finds it in the output.
        optimizer: from parameters to an optimizer.
    """

    factory: Callable[[], nn.Module] | str
    plan: Plan
    world: int
    inputs: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float64
    steps: int = 2
    loss: Loss | None = None
    optimizer: MakeOptimizer = adamw

    @property
    def spec(self) -> MeshSpec:
        """The plan's mesh on `world` ranks."""
        return MeshSpec.resolve(self.plan.mesh, self.world)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that hold different data: dp_replicate x dp_shard x cp."""
        return self.spec.degree("dp", "cp")


def resolve_factory(factory: Callable[[], nn.Module] | str) -> Callable[[], nn.Module]:
    """The factory itself, or the one that a model's name stands for."""
    return resolve_model(factory) if isinstance(factory, str) else factory


def build(job: Job) -> nn.Module:
    """The single-device model in `job.dtype`, with every parameter random: the same bits wherever it is called.

    Raises PlanError `bad-model` if the factory returns no module.
    """
    factory = resolve_factory(job.factory)
    torch.manual_seed(job.seed)
    model = factory()
    if not isinstance(model, nn.Module):
        raise PlanError(f"the factory returned a {type(model).__name__}", code="bad-model", legal="an nn.Module")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        materialise(model, torch.device("cpu"))
        init_weights(model, job.seed)
    model.to(job.dtype)
    randomise(model, job.seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Add to each floating parameter normal noise of its own spread, or of 0.1 where all its values are equal.

    Zeros (biases, LoRA's B) and ones (norms) hide errors: a gradient that is a product with them vanishes or repeats.
    The noise of a parameter depends on `seed` and its name alone. Parameters are plain tensors here.
    """
    for name, p in model.named_parameters():
        if not p.is_floating_point() or p.numel() == 0:
            continue
        generator = torch.Generator().manual_seed(stream_key(seed, "verify", name))
        spread = p.std(correction=0).item() or 0.1
        p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype), alpha=spread)


def find_loss(output: Any, batch: Batch) -> Tensor:
    """The first floating 0-dim tensor of `output`, a `loss` by name before others.

    Raises PlanError `no-loss` if there is none.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for leaf in (named, *leaves(output)):
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point():
            return leaf
    raise PlanError(
        "the model returns no floating 0-dim tensor to differentiate",
        code="no-loss",
        legal="declare the labels among the plan's inputs, or pass loss=: (output, batch) -> 0-dim tensor",
    )


def leaves(tree: Any) -> list[Any]:
    """The values in nested lists, tuples and mappings, in order."""
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def in_dtype(batch: Mapping[str, Any], dtype: torch.dtype) -> Batch:
    """The batch with its floating tensors in `dtype`."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def comparable(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan without what would hide or slow the comparison, and what therefore is not checked."""
    notes = []
    if plan.fsdp is not None:
        casts = [key for key in ("param_dtype", "reduce_dtype", "output_dtype") if getattr(plan.fsdp, key) is not None]
        if casts:
            shown = ", ".join(f"{key} {str(getattr(plan.fsdp, key)).removeprefix('torch.')}" for key in casts)
            notes.append(f"mixed precision (fsdp: {shown}): ranks computed in one dtype")
            fsdp = replace(plan.fsdp, param_dtype=None, reduce_dtype=None, output_dtype=None)
            plan = replace(plan, fsdp=fsdp)
    if plan.compile is not None:
        notes.append("torch.compile: modules ran eagerly, so the order of compiled collectives is open")
        plan = replace(plan, compile=None)
    return plan, tuple(notes)
