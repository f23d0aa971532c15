"""Rules for torch functions that have none of their own: take them apart into aten ops and follow the shards through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.compiler.kinds import Kind, replicated
from meshplan.compiler.match import choose, copies_of
from meshplan.compiler.rules import pointwise, reduce, views
from meshplan.compiler.rules.base import REP, Op, Strategy

_RULES = {**views.RULES, **reduce.RULES}


@dataclass(frozen=True)
class AtenOp:
    """One recorded aten op: its rule input and the ids of its tensors."""

    op: Op
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    elementwise: bool


class _Record(compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[AtenOp] = []
        self.keep: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in compat.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        made = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor)]
        if not made:  # a question about a tensor (its device, its size), not a computation
            return out
        self.keep += tensors + made
        op = Op(func.overloadpacket.__name__, args, kwargs, tuple(tensors), tuple(made))
        self.ops.append(AtenOp(op, tuple(map(id, tensors)), tuple(map(id, made)), pointwise.is_pointwise(func)))
        return out


def decompose(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[AtenOp], list[Tensor], list[Tensor]]:
    """The aten ops of one call on global fake tensors, with the result's tensors and every tensor kept alive."""
    record = _Record()
    with torch.no_grad(), record:
        out = func(*args, **kwargs)
    written = args[0] if out is None else out
    return record.ops, [x for x in compat.flatten(written)[0] if isinstance(x, Tensor)], record.keep


def rule_of(item: AtenOp, degree: int) -> list[Strategy]:
    """The strategies of one aten op; none where there is no rule."""
    rule = pointwise.pointwise if item.elementwise else _RULES.get(item.op.name)
    return rule(item.op, degree) if rule else []


# Their numbers are sizes and places of tensors, which a rank has of its own; a rule says whether its shards fit them.
_SIZED = frozenset(
    "view _unsafe_view reshape expand as_strided slice split split_with_sizes narrow arange zeros ones full empty".split()
)


def numbers(item: AtenOp) -> tuple[object, ...]:
    """The op's name and what it computes with beside tensors."""
    if item.op.name in _SIZED or item.op.name.startswith("new_"):
        return (item.op.name,)
    leaves = compat.flatten((item.op.args, item.op.kwargs))[0]
    return (item.op.name, *(repr(x) for x in leaves if not isinstance(x, Tensor)))


def follow(
    ops: Sequence[AtenOp], given: dict[int, Kind], results: Sequence[Tensor], degree: int
) -> tuple[Kind, ...] | None:
    """Kinds of `results` on one axis when the inputs have the `given` kinds (by tensor id) and every op runs on shards
    as it stands; None where some op cannot. Tensors not given are constants, replicated."""
    kinds = dict(given)
    for item in ops:
        have = [kinds.get(i, REP) for i in item.ins]
        if all(replicated(k) for k in have):
            outs: Sequence[Kind] = (REP,) * len(item.outs)
        else:
            choice = choose(rule_of(item, degree // copies_of(have)), have, item.op.ins, (True,) * len(have), degree)
            if choice is None or any(w is not None for w in choice.wanted):
                return None
            outs = choice.outs
        for i, kind in zip(item.outs, outs, strict=True):
            kinds[i] = kind
        if (
            item.op.name.endswith("_")
            and item.ins
            and item.ins[0] in given
            and kinds[item.outs[0]] != have[0]
            and not (replicated(kinds[item.outs[0]]) and replicated(have[0]))
        ):
            return None  # written in place: the target cannot change its layout
    return tuple(kinds.get(id(t), REP) for t in results)
