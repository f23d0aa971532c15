"""What a parallelised model carries at run time: its program, groups, gradient reductions and random streams.

The root's forward runs inside `Session.around`: the step begins, the inputs are checked against the program that was lowered
(and lowered again for a new signature), and the outputs are marked so that backward ends with whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.frames import positional_names
from meshplan.compiler.lowered import Core
from meshplan.compiler.opaque import refuse_state
from meshplan.errors import PlanError
from meshplan.mesh.build import Groups
from meshplan.ops.dropout import DropoutStreams
from meshplan.runtime.gradients import Gradients
from meshplan.runtime.offsets import declared_offsets, look_at, refuse_faults
from meshplan.runtime.unchanged import Unchanged
from meshplan.runtime.views import Step

Signature = tuple[Any, ...]


@dataclass
class Session:
    """State of one parallelised model. Attributes are set by `meshplan.lowering`."""

    model: nn.Module
    core: Core
    groups: Groups
    gradients: Gradients
    streams: DropoutStreams
    relower: Callable[[Signature, tuple[Any, ...], dict[str, Any]], Core]
    install: Callable[[Core], None]
    check: Callable[[Signature], None]
    lowered: Any = None
    known: dict[Signature, Core] = field(default_factory=dict)
    current: Signature | None = None
    microbatch: int | None = None  # of an open `accumulate`
    microbatches: int = 0
    unchanged: Unchanged | None = None

    def __post_init__(self) -> None:
        self._offsets = declared_offsets(self.core)

    def around(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The root's forward."""
        if self.unchanged is not None:
            self.unchanged.check()
        self._select(args, kwargs)
        if torch.is_grad_enabled() and self.model.training:
            self._advance()
        Step.enter()
        try:
            out = run(*args, **kwargs)
        finally:
            Step.leave()
        for x in (out,) if isinstance(out, Tensor) else compat.flatten(out)[0]:
            if isinstance(x, Tensor):
                self.gradients.watch(x)
        return out

    def _advance(self) -> None:
        if self.microbatch is None:
            self.streams.begin_step()
        else:
            self.streams.begin_microbatch(self.microbatch)

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = signature_of(self.model, args, kwargs)
        said = look_at(self._offsets, self.model, args, kwargs) if self._offsets else ()
        self.check((*signature, *said))
        refuse_faults(self._offsets, said)
        if signature == self.current:
            return
        if signature not in self.known:
            self.known[signature] = self.relower(signature, args, kwargs)
        if self.known[signature] is not self.core:
            self.install(self.known[signature])
            self.core = self.known[signature]
        self.current = signature


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """What a program is lowered for: the local shapes and dtypes of all tensors, the constants, and the training flag.

    Raises PlanError `argument-state` for an object that carries tensors out of sight."""
    names = positional_names(model)
    described: list[tuple[Any, ...]] = []
    for i, arg in enumerate(args):
        described += _described(names[i] if i < len(names) else str(i), arg)
    for name, arg in kwargs.items():
        described += _described(name, arg)
    described.sort(key=itemgetter(0))
    return (model.training, *described)


def _described(name: str, arg: Any) -> list[tuple[Any, ...]]:
    """Each leaf of an argument by its key path. What is None might as well not have been given."""
    if isinstance(arg, Tensor):  # nearly always: walking a tree costs more than all the rest
        return [(name, tuple(arg.shape), arg.dtype, arg.requires_grad)]
    if arg is None:
        return []
    found: list[tuple[Any, ...]] = []
    for path, x in compat.flatten_with_path(arg):
        key = f"{name}.{path}" if path else name
        if isinstance(x, Tensor):
            found.append((key, tuple(x.shape), x.dtype, x.requires_grad))
        elif x is not None:
            refuse_state(key, x)
            found.append((key, repr(x)))
    return found


def session_of(model: nn.Module) -> Session:
    """The session of a model that `parallelize` returned. Raises PlanError `not-parallelized`."""
    found = model.__dict__.get("_meshplan_session")
    if found is None:
        raise PlanError(
            f"this {type(model).__name__} was not parallelised", code="not-parallelized",
            legal="the model that meshplan.parallelize returned",
        )  # fmt: skip
    return found


@contextmanager
def accumulate(model: nn.Module, steps: int) -> Iterator[None]:
    """Around `steps` forward/backward pairs: gradients add up and are reduced once, at the last backward.

    They are those of one device that accumulates as many pairs. A loss that is no mean over tokens, such as a balance loss of
    experts, is then of each microbatch and not of all together; see `token_mean` for means over unequal numbers of tokens.

    Under FSDP see `meshplan.lowering.fsdp_accumulation`. Raises PlanError `accumulate-count` when the block does not run
    exactly `steps` backward passes under FSDP, `accumulate-nested`, `bad-accumulate-steps`.
    """
    from meshplan.lowering import fsdp_accumulation

    session = session_of(model)
    if steps < 1:
        raise PlanError(f"steps={steps}", code="bad-accumulate-steps", legal="steps >= 1")
    if session.microbatch is not None:
        raise PlanError("accumulate inside accumulate", code="accumulate-nested", legal="one block around all pairs")
    sharded = getattr(model, "_meshplan_fsdp", None) is not None
    gradients = session.gradients
    session.streams.begin_step()
    session.microbatch, session.microbatches = -1, steps
    gradients.hold()
    gradients.accumulating = True

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            session.microbatch = (session.microbatch or 0) + 1 if session.microbatch is not None else 0
            gradients.deferred = session.microbatch < steps - 1

    handle = model.register_forward_pre_hook(count, with_kwargs=True, prepend=True)
    try:
        if sharded:
            with fsdp_accumulation.accumulate(model, steps):
                yield
        else:
            yield
    finally:
        handle.remove()
        session.microbatch = None
        gradients.accumulating = gradients.deferred = False
