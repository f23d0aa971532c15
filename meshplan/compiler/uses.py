"""What a propagation decided call by call, and the uses of rules in it: what the value checks run with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshplan import compat
from meshplan.compiler.capture import Call, Ref, Trace
from meshplan.compiler.kinds import I, Kind, N, Pending, R, replicated
from meshplan.ops.experts.block import block_call
from meshplan.ops.experts.call import experts_call


@dataclass(frozen=True)
class Decided:
    """One call as a rank runs it: kinds of its tensor arguments (after redistribution) and results, each with one kind
    an axis, and the semantic operator that stands for the call on each axis, or None."""

    call: Call
    ins: tuple[tuple[Kind, ...], ...]
    outs: tuple[tuple[Kind, ...], ...]
    replace: tuple[str | None, ...]


@dataclass(frozen=True)
class Spec:
    """A tensor of a use: its global shape, dtype, and whether gradients flow to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass(frozen=True)
class Use:
    """One call on one axis, with nothing left of the model around it.

    Attributes:
        func, name: the torch function.
        leaves, structure: flattened arguments, the k-th tensor as `Ref(k)`.
        tensors: the tensor arguments at global shape, in the order of the call.
        ins, outs: their kinds and those of the results on the axis; replicated ones without gradient are N.
        replace: the semantic operator that runs in the call's place, or None.
        degree: ranks on the axis.
    """

    func: Any
    name: str
    in_place: bool
    leaves: tuple[Any, ...]
    structure: Any
    tensors: tuple[Spec, ...]
    ins: tuple[Kind, ...]
    outs: tuple[Kind, ...]
    replace: str | None
    degree: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for uses that are the same question."""
        return (
            self.func,
            repr(self.leaves),
            repr(self.structure),
            self.tensors,
            self.ins,
            self.outs,
            self.replace,
            self.degree,
        )

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the call on `tensors`."""
        return compat.unflatten([tensors[x.value] if isinstance(x, Ref) else x for x in self.leaves], self.structure)


def use_of(decided: Decided, k: int, degree: int, trace: Trace) -> Use | None:
    """The use of `decided` on axis number `k` of `degree` ranks; None where all of it is replicated there, and for experts."""
    call = decided.call
    if call.func in (experts_call, block_call):
        return None  # a module, and not a function of its arguments: see experts_check.py, experts_trial.py
    ins, outs = [t[k] for t in decided.ins], [t[k] for t in decided.outs]
    if all(map(replicated, ins)) and all(map(replicated, outs)):
        return None
    values = [trace.values[v] for v in call.ins]
    made = [trace.values[v].requires_grad for v in call.outs]
    # With gradients off none comes back, whatever the arguments are. A constant that was written has had none before.
    flows = [t.requires_grad and any(made) for t in values]
    if call.in_place and all(kind == N for kind in decided.ins[0]):
        flows[0] = False
    tensors = tuple(Spec(tuple(t.shape), t.dtype, grad) for t, grad in zip(values, flows, strict=True))
    numbered: list[Any] = []
    for leaf in call.leaves:
        numbered.append(Ref(sum(isinstance(x, Ref) for x in numbered)) if isinstance(leaf, Ref) else leaf)
    return Use(
        call.func, call.name, call.in_place, tuple(numbered), call.structure, tensors,
        tuple(_plain(kind, t.grad) for kind, t in zip(ins, tensors, strict=True)),
        tuple(_plain(kind, g) for kind, g in zip(outs, made, strict=True)),
        decided.replace[k], degree,
    )  # fmt: skip


def _plain(kind: Kind, grad: bool) -> Kind:
    return settled(kind) if grad or not replicated(kind) else N


def settled(kind: Kind) -> Kind:
    """The kind, with what was open as its consumers decided: R if any of them needs a partial gradient, else I."""
    if isinstance(kind, Pending):
        return R if R in kind.find().needs else I
    return kind


def final(decided: Decided) -> Decided:
    """With every open kind settled."""
    return replace(
        decided,
        ins=tuple(tuple(map(settled, t)) for t in decided.ins),
        outs=tuple(tuple(map(settled, t)) for t in decided.outs),
    )  # fmt: skip
