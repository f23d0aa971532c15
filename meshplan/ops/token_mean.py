"""The mean of a loss over all valid tokens of the global batch, when ranks hold unequal numbers of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call, all_reduces
from meshplan.ops.precision import wide
from meshplan.runtime.comm import AxisGroup


def reduce_over(groups: Sequence[AxisGroup], value: Tensor) -> Tensor:
    """`value` summed over every group in turn (not differentiable: for counts and shown values)."""
    for group in groups:
        value = group.all_reduce(value)
    return value


def ranks_of(groups: Sequence[AxisGroup]) -> int:
    """Number of ranks that the groups span together."""
    # A list: dynamo cannot hand a generator to math.prod.
    return math.prod([group.size for group in groups])


def token_mean(
    loss_per_token: Tensor,
    mask: Tensor | None = None,
    n_tokens: int | Tensor | None = None,
    *,
    groups: Sequence[AxisGroup],
    data_ranks: int | None = None,
) -> Tensor:
    """This rank's share of the mean loss over all valid tokens, scaled for gradients that are averaged over data ranks.

    The value is `local sum x data ranks / global count`, so that

        rank 0: 1 valid token, loss 4        -> 4 x 2 / 4 = 2.0
        rank 1: 3 valid tokens, loss 1 each  -> 3 x 2 / 4 = 1.5      mean over ranks = 7 / 4, the one-device mean

    A rank without valid tokens gives 0; no valid token anywhere gives nan, as a mean over nothing does.

    Arguments:
        loss_per_token: floating tensor of any shape, the losses of this rank's tokens.
        mask: same shape. Boolean or integer: nonzero marks a valid token. Floating: a weight per token, and the mean is
            the weighted one. None means that all tokens are valid. Losses under a zero are never read, nan included.
        n_tokens: the global count (or weight) over all ranks and all microbatches, if the caller knows it, as under
            gradient accumulation. Then nothing is communicated.
        groups: the axes over which tokens are split; one flattened group makes one `all_reduce` of one element.
        data_ranks: number of ranks over which the gradient is averaged; default all ranks of `groups`. Give it when
            tokens are also split on an axis whose gradients are summed (tp under sequence parallelism).

    Returns:
        A 0-dim tensor of the dtype of `loss_per_token`.

    Raises:
        PlanError: `mask-shape` if the mask does not have the shape of the losses (it is not broadcast).
    """
    if mask is not None and mask.shape != loss_per_token.shape:
        raise PlanError(
            f"token_mean got losses of shape {list(loss_per_token.shape)} and a mask of shape {list(mask.shape)}",
            code="mask-shape",
            legal="a mask with one entry per loss, of the same shape",
        )
    losses = loss_per_token.to(wide(loss_per_token.dtype))
    if mask is None:
        total = losses.sum()
    elif mask.is_floating_point():
        total = torch.where(mask != 0, losses * mask.to(losses.dtype), 0.0).sum()
    else:
        total = torch.where(mask != 0, losses, 0.0).sum()
    if n_tokens is None:
        n_tokens = reduce_over(groups, _count(losses, mask))
    ranks = ranks_of(groups) if data_ranks is None else data_ranks
    return (total / n_tokens * ranks).to(loss_per_token.dtype)


def global_mean(value: Tensor, *, groups: Sequence[AxisGroup]) -> Tensor:
    """The mean over ranks of a loss scaled as `token_mean` scales it: the single-device number, to print or log.

    One `all_reduce` per group; detached; equal on all ranks of the groups.

    Arguments:
        value: floating tensor of any shape, usually 0-dim.
    """
    return reduce_over(groups, value.detach()) / ranks_of(groups)


def collectives(*, groups: Sequence[AxisGroup], n_tokens_given: bool = False) -> list[Call]:
    """What one `token_mean` call communicates forward. Backward communicates nothing."""
    return [] if n_tokens_given else all_reduces(groups, 1)


def _count(losses: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full((), losses.numel(), dtype=torch.int64, device=losses.device)
    if mask.is_floating_point():
        return mask.detach().to(losses.dtype).sum()
    # Counted in int64: float32 stops counting at 16.8 million tokens, which is one large global batch.
    return (mask != 0).sum()
