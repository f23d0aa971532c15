"""Rules of losses that compare two tensors element by element: split anywhere, reduced as their `reduction` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from meshplan.compiler.kinds import A, Kind, P
from meshplan.compiler.rules.base import REP, Op, Rule, Strategy
from meshplan.plan.placements import Shard


def elementwise(position: int) -> Rule:
    """The rule of a loss whose `reduction` is argument number `position`; all its tensors have one shape."""

    def rule(op: Op, n: int) -> list[Strategy]:
        shape = op.ins[0].shape
        if any(t.shape != shape for t in op.ins):
            return []
        reduction = op.arg(position, "reduction", "mean")
        found = []
        for d, size in enumerate(shape):
            out: Kind | None = Shard(d) if reduction == "none" else P if reduction == "sum" else None
            if reduction == "mean" and size % n == 0:
                out = A  # a mean of the ranks' means, where each stands for as many elements
            elif reduction == "batchmean":  # a sum over all elements divided by the length of dim 0
                out = P if d else A if size % n == 0 else None
            if out is not None:
                found.append(Strategy((Shard(d),) * len(op.ins), (out,)))
        return found

    return rule


def nll(op: Op, n: int) -> list[Strategy]:
    """F.nll_loss(scores [N, C, ...], target [N, ...]): tokens split. Its mean divides by the valid tokens of one
    rank only, and is not done on shards."""
    scores, reduction = op.ins[0], op.arg(6, "reduction", "mean")
    classes = 0 if scores.dim() == 1 else 1
    rest = (REP,) * (len(op.ins) - 2)
    if reduction not in ("none", "sum"):
        return []
    found = []
    for d in range(scores.dim()):
        if d != classes:
            own = d if d < classes else d - 1
            found.append(Strategy((Shard(d), Shard(own), *rest), (Shard(own) if reduction == "none" else P,)))
    return found


_PAIR = ("input", "target", "size_average", "reduce", "reduction")
RULES: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div), elementwise(4)),
    F.huber_loss: elementwise(2),
    **dict.fromkeys((F.binary_cross_entropy, F.binary_cross_entropy_with_logits), elementwise(5)),
    F.nll_loss: nll,
}
SIGNATURES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.mse_loss: (*_PAIR, "weight"),
    F.l1_loss: (*_PAIR, "weight"),
    F.smooth_l1_loss: (*_PAIR, "beta"),
    F.kl_div: (*_PAIR, "log_target"),
    F.huber_loss: ("input", "target", "reduction", "delta", "weight"),
    F.binary_cross_entropy: ("input", "target", "weight", "size_average", "reduce", "reduction"),
    F.binary_cross_entropy_with_logits: (
        "input", "target", "weight", "size_average", "reduce", "reduction", "pos_weight",
    ),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}  # fmt: skip
