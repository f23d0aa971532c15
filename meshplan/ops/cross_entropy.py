"""Cross entropy over logits whose classes are split across ranks, with a mean over the tokens of all ranks.

    split classes:  logits [N, V] -> S(1) on tp;  max and (normaliser, target logit) are all-reduced, logits never move
    split tokens:   the mean divides by the valid tokens (or class weights) of all data ranks, counted together

Forward makes one `all_reduce` max of N elements and one `all_reduce` sum of 2N (3N with label smoothing) over the
vocabulary group, and for `mean` one `all_reduce` of one element per count group. Backward makes none: with p the
softmax, dlogits = g (p - onehot), which needs only what forward kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call, all_reduces
from meshplan.ops.derivative import require_first
from meshplan.ops.ids import locate, require_in_range
from meshplan.ops.precision import autocast_to_float32, wide
from meshplan.ops.token_mean import ranks_of, reduce_over
from meshplan.runtime.comm import AxisGroup, chunk_sizes

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits_local: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    vocab_group: AxisGroup,
    vocab_size: int,
    count_groups: Sequence[AxisGroup] = (),
    data_ranks: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of the global batch, from this rank's classes of this rank's tokens.

    `mean` and `sum` come scaled so that their *mean* over the data ranks is the single-device value, and so that
    averaging gradients over data ranks gives the single-device gradient:

        mean: local sum x data ranks / global count      sum: local sum x data ranks      none: unscaled, per token

    The count is of valid tokens, or of their class weights, over all ranks; if it is zero the result is nan and the
    gradient zero, as in torch. float64 and float32 are computed in their own precision. float16 and bfloat16 logits
    are accumulated in float32, the loss is rounded once, to the dtype of the logits (torch rounds each log-probability
    too, so it is the less exact one there); under autocast the result is float32, as torch's.

    Arguments:
        logits_local: `[N, V_local, d1, ...]` or `[V_local]`; V_local is this rank's entry of
            `chunk_sizes(vocab_size, vocab_group.size)` and may be 0.
        target: integer class ids, `[N, d1, ...]` or `[]`, global ids, equal on all ranks of `vocab_group`.
        weight: `[vocab_size]` class weights, replicated; never split, and without gradient (as in torch).
        vocab_group: the ranks over which classes are split; a group of one rank if they are not.
        vocab_size: global number of classes.
        count_groups: the axes over which tokens are split; one flattened group makes one `all_reduce`.
        data_ranks: number of ranks over which gradients are averaged; default all ranks of `count_groups`. Give it
            when tokens are also split on an axis whose gradients are summed (tp under sequence parallelism).
        ignore_index: targets with this id do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1]; the share of the target spread evenly over all `vocab_size` classes.

    Returns:
        0-dim for mean and sum, the shape of `target` for none; equal on all ranks of `vocab_group`.

    Raises:
        PlanError: `class-probabilities`, `vocab-shard-size` (gathered logits among them), `target-shape`,
            `class-weight`, `reduction`, `label-smoothing`.
        IndexError: a target outside `[0, vocab_size)` that is not `ignore_index` (on the CPU, outside compilation).
    """
    _check(logits_local, target, weight, vocab_group, vocab_size, reduction, label_smoothing)
    require_in_range(target, vocab_size, "Target {} is out of bounds.", ignore_index)
    logits = autocast_to_float32(logits_local, on_cpu=True)
    batched = logits.dim() > 1
    if not batched:
        logits, target = logits.unsqueeze(0), target.unsqueeze(0)
    weight = None if weight is None else weight.to(wide(logits.dtype))
    losses = _CrossEntropy.apply(logits, target, weight, vocab_group, vocab_size, ignore_index, label_smoothing)
    if reduction == "none":
        return losses.to(logits.dtype) if batched else losses.squeeze(0).to(logits.dtype)
    total = losses.sum()
    if reduction == "mean":
        valid = target != ignore_index
        if weight is None:
            # An int64 count: float32 stops counting at 16.8 million tokens.
            count = valid.sum()
        else:
            count = torch.where(valid, weight[target.long().clamp(0, vocab_size - 1)], 0.0).sum()
        total = total / reduce_over(count_groups, count)
    ranks = ranks_of(count_groups) if data_ranks is None else data_ranks
    return (total * ranks).to(logits.dtype)


def collectives(
    tokens: int,
    *,
    vocab_group: AxisGroup,
    count_groups: Sequence[AxisGroup] = (),
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> list[Call]:
    """What one `cross_entropy` call over `tokens` local targets communicates forward, in order. Backward: nothing."""
    packed = 3 if label_smoothing > 0 else 2
    calls = all_reduces([vocab_group], tokens) + all_reduces([vocab_group], packed * tokens)
    return calls + (all_reduces(count_groups, 1) if reduction == "mean" else [])


class _CrossEntropy(torch.autograd.Function):
    """Unreduced losses [N, d1, ...], zero where ignored, in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        group: AxisGroup,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        scores = logits.to(wide(logits.dtype))
        if logits.shape[1] == 0:
            # An empty shard has no maximum; it still joins every collective.
            top = scores.new_full(target.shape, float("-inf"))
        else:
            top = scores.amax(1)
        top = group.all_reduce(top, "max")
        shifted = scores - top.unsqueeze(1)
        parts = [_pick(shifted, target, group, vocab_size)]
        if smoothing > 0:
            parts.append((shifted if weight is None else shifted * _classes(weight, group, shifted.dim())).sum(1))
        parts.append(shifted.exp_().sum(1))
        at_target, *spread, normaliser = group.all_reduce(torch.stack(parts)).unbind(0)

        log_normaliser = normaliser.log()
        losses = (log_normaliser - at_target) * (1 - smoothing)
        if weight is not None:
            losses = losses * weight[target.long().clamp(0, vocab_size - 1)]
        if smoothing > 0:
            mass = vocab_size if weight is None else weight.sum()
            losses = losses + (mass * log_normaliser - spread[0]) * (smoothing / vocab_size)
        ctx.save_for_backward(logits, target, weight, top, normaliser)
        ctx.group, ctx.vocab_size, ctx.ignore_index, ctx.smoothing = group, vocab_size, ignore_index, smoothing
        return torch.where(target != ignore_index, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first("cross_entropy")
        logits, target, weight, top, normaliser = ctx.saved_tensors
        group, vocab_size, smoothing = ctx.group, ctx.vocab_size, ctx.smoothing
        if logits.shape[1] == 0:
            return torch.zeros_like(logits), None, None, None, None, None, None
        grad = torch.where(target != ctx.ignore_index, grad, 0.0)
        if group.averages:  # the loss is whole, and a shard's gradient is kept times n there: see runtime/boundary.py
            grad = grad * group.size
        # loss = a (lse - z_t) + b sum_c w_c (lse - z_c), so dz_c = (a + b sum w) p_c - a [c = t] - b w_c.
        on_target = grad * (1 - smoothing)
        if weight is not None:
            on_target = on_target * weight[target.long().clamp(0, vocab_size - 1)]
        on_each = grad * (smoothing / vocab_size)
        on_softmax = on_target
        if smoothing > 0:
            on_softmax = on_target + on_each * (vocab_size if weight is None else weight.sum())
        # One buffer of the logits' size, turned into the gradient in place.
        out = (logits.to(top.dtype) - top.unsqueeze(1)).exp_()
        out.mul_((on_softmax / normaliser).unsqueeze(1))
        if smoothing > 0:
            if weight is None:
                out.sub_(on_each.unsqueeze(1))
            else:
                out.addcmul_(on_each.unsqueeze(1), _classes(weight, group, out.dim()), value=-1)
        row, inside = locate(target, group, vocab_size)
        out.scatter_add_(1, row.unsqueeze(1), torch.where(inside, -on_target, 0.0).unsqueeze(1))
        return out.to(logits.dtype), None, None, None, None, None, None


def _pick(shifted: Tensor, target: Tensor, group: AxisGroup, vocab_size: int) -> Tensor:
    """The shifted logit of each token's target if this shard holds it, else 0: a summand of the global one."""
    if shifted.shape[1] == 0:
        return shifted.new_zeros(target.shape)
    row, inside = locate(target, group, vocab_size)
    return torch.where(inside, shifted.gather(1, row.unsqueeze(1)).squeeze(1), 0.0)


def _classes(weight: Tensor, group: AxisGroup, dims: int) -> Tensor:
    """This rank's class weights, shaped to broadcast over the class dim of a tensor of `dims` dims."""
    return group.shard(weight, 0).view(-1, *[1] * (dims - 2))


def _check(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    group: AxisGroup,
    vocab_size: int,
    reduction: str,
    smoothing: float,
) -> None:
    if reduction not in REDUCTIONS:
        raise PlanError(f"reduction {reduction!r} of cross_entropy is unknown", code="reduction", legal=[*REDUCTIONS])
    if not 0.0 <= smoothing <= 1.0:
        raise PlanError(f"label_smoothing is {smoothing}", code="label-smoothing", legal="a number in [0, 1]")
    if target.is_floating_point():
        raise PlanError(
            "cross_entropy over split logits got class probabilities as its target",
            code="class-probabilities",
            legal="integer class ids; or gather the logits (an output layout of R) and use torch's own loss",
        )
    class_dim = 1 if logits.dim() > 1 else 0
    mine = chunk_sizes(vocab_size, group.size)[group.rank]
    if logits.shape[class_dim] != mine:
        gathered = " (they look gathered)" if logits.shape[class_dim] == vocab_size else ""
        raise PlanError(
            f"cross_entropy got logits with {logits.shape[class_dim]} classes{gathered}; rank {group.rank} of "
            f"{group.size} on {group.axis} holds {mine} of {vocab_size}",
            code="vocab-shard-size",
            legal=f"logits laid out S({class_dim}) on {group.axis}",
        )
    tokens = logits.shape[:class_dim] + logits.shape[class_dim + 1 :]
    if target.shape != tokens:
        raise PlanError(
            f"cross_entropy got logits of shape {list(logits.shape)} and a target of shape {list(target.shape)}",
            code="target-shape",
            legal=f"a target of shape {list(tokens)}",
        )
    if weight is not None and (weight.shape != (vocab_size,) or weight.requires_grad):
        raise PlanError(
            f"the class weight of cross_entropy has shape {list(weight.shape)}"
            + (" and requires a gradient, which torch does not define" if weight.requires_grad else ""),
            code="class-weight",
            legal=f"a replicated tensor of shape [{vocab_size}] without gradient",
        )
