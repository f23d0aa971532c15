"""What one device does: the user's own program, its losses, gradients and stepped parameters, kept in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.attention.flex import taken_whole
from meshplan.ops.dropout import DropoutStreams
from meshplan.runtime.init import init_weights
from meshplan.verify.dropout import single_device_dropout
from meshplan.verify.inputs import describe, make_batch
from meshplan.verify.job import Batch, Job, adamw, build, find_loss, in_dtype
from meshplan.verify.payload import single_device_payload


@dataclass(frozen=True)
class Reference:
    """What the parent needs of the reference; the tensors stay in the file.

    Attributes:
        losses: of each step.
        gradient_sizes: largest absolute value of each parameter's gradient in the first step (0.0 without one).
        parameter_sizes: largest absolute value of each parameter after the last step.
        inputs: the batch as text, such as `int64[4, 32]`.
        initialiser: why `init_weights` refused the model, or None where its values are in the file.
        masked: whether it trained with flex_attention under a mask given as a tensor: see `_Steps`.
    """

    losses: tuple[float, ...]
    gradient_sizes: dict[str, float]
    parameter_sizes: dict[str, float]
    inputs: dict[str, str]
    initialiser: str | None
    masked: bool = False


def run_reference(job: Job, path: str) -> Reference:
    """Run `job` on one device and save `{batch, gradients, parameters, initial}` with `torch.save` at `path`.

    Gradients are those of the first step, parameters those after the last; tied parameters appear under each name.
    """
    model = build(job)
    batch = global_batch(job, model)
    optimizer: torch.optim.Optimizer | None = None
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    with single_device_dropout(model, job.seed) as streams, single_device_payload(model, job.plan):
        steps = _Steps(job, model, batch, streams)
        for step in range(job.steps):
            model.zero_grad()
            loss, value = steps.next()
            loss.backward()
            losses.append(value)
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in named_parameters(model).items() if p.grad is not None}
            optimizer = optimizer or fitted(job, {n: size(g) for n, g in gradients.items()}).optimizer(model.parameters())
            optimizer.step()
    parameters = {n: p.detach().clone() for n, p in named_parameters(model).items()}
    initial, refused = _initial(model, job.seed)
    torch.save({"batch": batch, "gradients": gradients, "parameters": parameters, "initial": initial}, path)
    return Reference(
        losses=tuple(losses),
        gradient_sizes={n: size(gradients[n]) if n in gradients else 0.0 for n in parameters},
        parameter_sizes={n: size(p) for n, p in parameters.items()},
        inputs=describe(batch),
        initialiser=refused,
        masked=steps.masked,
    )


class _Steps:
    """The forward of each step.

    torch has no backward of flex_attention on the CPU. A model that calls it has the loss of a step by torch's own operator,
    without gradients, and its gradients by attention under the same mask given as a tensor; `masked` then says so.
    """

    def __init__(self, job: Job, model: nn.Module, batch: Batch, streams: DropoutStreams) -> None:
        self._job, self._model, self._batch, self._streams = job, model, batch, streams
        self.masked = False

    def next(self) -> tuple[Tensor, float]:
        """The loss to differentiate, and its value by the user's own program."""
        at = self._streams.state_dict()
        if not self.masked:
            try:
                loss = self._forward(at)
                return loss, loss.item()
            except NotImplementedError as error:
                if not compat.lacks_flex_backward(error):
                    raise
                self.masked = True
        with torch.no_grad(), compat.without_compiling():
            value = self._forward(at).item()
        with compat.taking_flex(taken_whole()):
            return self._forward(at), value

    def _forward(self, at: dict[str, int]) -> Tensor:
        self._streams.load_state_dict(at)
        self._streams.begin_step()
        return (self._job.loss or find_loss)(self._model(**self._batch), self._batch)


def fitted(job: Job, gradient_sizes: Mapping[str, float]) -> Job:
    """`job`, its default optimizer fitted to gradients whose largest values are `gradient_sizes`."""
    if job.optimizer is not adamw:
        return job
    return replace(job, optimizer=partial(adamw, largest=max(gradient_sizes.values(), default=1.0)))


def global_batch(job: Job, model: nn.Module) -> Batch:
    """The job's global batch: given, asked for, or made from the plan. `model` is the single-device one."""
    if job.inputs is None:
        made: Mapping[str, Any] = make_batch(job.plan.inputs, job.spec, model, job.seed)
    else:
        made = job.inputs() if callable(job.inputs) else job.inputs
    return in_dtype(made, job.dtype)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, a tied one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def size(x: Tensor) -> float:
    """The largest absolute value, 0.0 for an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0


def digest(x: Any) -> str:
    """A hash of a tensor's shape, dtype and bytes, or of the `repr` of anything else."""
    if not isinstance(x, Tensor):
        return hashlib.blake2b(repr(x).encode(), digest_size=16).hexdigest()
    head = f"{x.dtype}{list(x.shape)}".encode()
    data = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.blake2b(head + data, digest_size=16).hexdigest()


def _initial(model: nn.Module, seed: int) -> tuple[dict[str, Tensor], str | None]:
    try:
        init_weights(model, seed)
    except PlanError as error:
        return {}, error.message
    return {n: p.detach().clone() for n, p in named_parameters(model).items()}, None
