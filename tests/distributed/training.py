"""Training one model the same way on ranks and on one device, and what the two must agree in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshplan as mp
from meshplan import compat
from meshplan.verify.rank import part
from meshplan.verify.reference import digest, named_parameters
from tests.distributed.models import BATCH, SEQ, VOCAB

Batch = dict[str, Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Trained:
    """What a run left.

    Attributes:
        losses: of each backward; on ranks, this rank's own value.
        norms: gradient norm before clipping, of each step that clipped.
        gradients, parameters: full tensors after the last step, by name (no entry for a gradient that is None).
        shards: a hash of each local parameter and of its gradient, by name and which part of the whole it is.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    shards: dict[tuple[str, str], str] = field(default_factory=dict)


def batch(step: int = 0, rows: int = BATCH, seq: int = SEQ) -> Batch:
    """Tokens and labels `[rows, seq]` of a step; row r ignores r labels, so that no two data ranks count alike."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (rows, seq), generator=generator)
    labels = torch.randint(VOCAB, (rows, seq), generator=generator)
    for row in range(rows):
        labels[row, :row] = -100
    return {"tokens": tokens, "labels": labels}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def built(factory: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with the same values wherever it is called, none of them zero or one."""
    torch.manual_seed(0)
    model = factory().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float64).to(p.dtype), alpha=0.05)
    return model


def one_device(
    factory: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    optimizer: Optimizer = adamw,
    clip: float | None = None,
) -> Trained:
    """Train on one device: `batches[i]` are the microbatches that step i accumulates."""
    model = built(factory)
    stepper = optimizer(model.parameters())
    losses, norms = [], []
    for micro in batches:
        stepper.zero_grad()
        for one in micro:
            loss = model(**one)
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        stepper.step()
    return _left(model, losses, norms)


def on_this_rank(
    factory: Callable[[], nn.Module],
    plan: mp.Plan,
    batches: Sequence[Sequence[Batch]],
    optimizer: Optimizer = adamw,
    clip: float | None = None,
) -> Trained:
    """The same under `plan`, as one rank of it: `batches` are global."""
    model = mp.parallelize(built(factory), plan)
    stepper = optimizer(model.parameters())
    losses, norms = [], []
    for micro in batches:
        stepper.zero_grad()
        with mp.accumulate(model, steps=len(micro)):
            for one in micro:
                loss = model(**mp.shard_batch(model, one))
                loss.backward()
                losses.append(loss.item())
        if clip is not None:
            norms.append(mp.clip_grad_norm_(model.parameters(), clip).item())
        stepper.step()
    return _left(model, losses, norms)


def _left(model: nn.Module, losses: list[float], norms: list[float]) -> Trained:
    parameters = named_parameters(model)
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    local = {**parameters, **{f"{name}.grad": g for name, g in gradients.items()}}
    return Trained(
        losses, norms, {n: full(g) for n, g in gradients.items()}, {n: full(p) for n, p in parameters.items()},
        {(name, part(x)): digest(x.to_local() if isinstance(x, DTensor) else x) for name, x in local.items()},
    )  # fmt: skip


@torch.no_grad()
def full(x: Tensor) -> Tensor:
    """The whole tensor, detached."""
    return (compat.full_tensor(x) if isinstance(x, DTensor) else x).detach().clone()


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of one tensor, relative to the larger of that tensor and 1e-6 of the largest; infinite
    where names differ."""
    if set(got) != set(want):
        return float("inf")
    most = max(w.abs().max().item() for w in want.values())
    return max(
        (got[n] - w).abs().max().item() / max(w.abs().max().item(), 1e-6 * most) for n, w in want.items() if w.numel()
    )


def mean_losses(ranks: Sequence[Trained]) -> list[float]:
    """The loss of each backward: the mean over the ranks, whose values it is the contract to scale for that."""
    return [sum(values) / len(ranks) for values in zip(*(r.losses for r in ranks), strict=True)]
