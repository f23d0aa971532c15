"""Which rows of tokens the experts read and where their results go: permute, unpermute and combine by explicit indices.

A *slot* is one choice of one token: slot j of token t is number t k + j. A *pair* is a slot that has an expert here; a negative
index is a slot without one (a padded token, a dropped choice). Pairs are sorted by expert, and by slot within one:

    indices [[2, 0], [0, -1], [2, 1]]   sorted slots 1 2 | 5 | 0 4   rows 0 1 | 2 | 0 2   counts 2 1 2
                                        place [[3, 0], [1, 5], [4, 2]], 5 for none

Forward and backward both gather through such tables, and sum what a token's slots have in a fixed order (on the CPU that of
pairs, elsewhere that of slots): no atomics, the same bits at every run. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshplan.ops.derivative import require_first
from meshplan.ops.precision import wide


class Pairs(NamedTuple):
    """A sorted list of N pairs over M rows.

    Attributes:
        rows: int64 [N], the row that each pair reads.
        slots: int64 [N], its slot, where the row's weights lie.
        place: int64 [M, k], the pair of each slot, N for none.
        whole: whether every slot is known to have a pair.
    """

    rows: Tensor
    slots: Tensor
    place: Tensor
    whole: bool


def sorted_slots(keys: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their keys, those with no key in [0, experts) last, and how many there are of each key.

    Arguments:
        keys: integers [M, k].

    Returns:
        int64 [M k] and int64 [experts].
    """
    flat = keys.flatten()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    ordered, slots = flat.sort(stable=True)
    bounds = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
    return slots, torch.searchsorted(ordered, bounds).diff()


def pairs_of(slots: Tensor, n: int, k: int) -> Pairs:
    """The first `n` of the sorted slots of M rows with k each.

    Arguments:
        slots: int64 [M k] from `sorted_slots`; n: the sum of its counts.
    """
    kept = slots[:n]
    return Pairs(kept // k, kept, _inverse(kept, slots.shape[0], n).view(-1, k), n == slots.shape[0])


def regroup(counts: Tensor, n: int) -> tuple[Pairs, Pairs]:
    """From blocks by (source, expert) to blocks by (expert, source), and back.

    Arguments:
        counts: int64 [sources, experts], rows in each block; n: their sum.
    """
    flat, turned = counts.flatten(), counts.T.flatten()
    starts = (flat.cumsum(0) - flat).view_as(counts).T.flatten()
    shift = starts - (turned.cumsum(0) - turned)
    order = torch.arange(n, device=counts.device) + torch.repeat_interleave(shift, turned, output_size=n)
    back = _inverse(order, n, n)
    return Pairs(order, order, back[:, None], True), Pairs(back, back, order[:, None], True)


def expand(x: Tensor, pairs: Pairs) -> Tensor:
    """The row of every pair: [M, ...] -> [N, ...]. Backward sums the gradients of a row's pairs."""
    return _Expand.apply(x, pairs)  # type: ignore[no-any-return]


def collect(y: Tensor, pairs: Pairs) -> Tensor:
    """The sum over the pairs of a row: [N, ...] -> [M, ...]. Its backward is `expand`."""
    return _Collect.apply(y, pairs)  # type: ignore[no-any-return]


def combine(y: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """out[m] = sum over slots j of weights[m, j] y[place[m, j]], slots without a pair left out.

    The sum is in wide precision and rounded once. The gradient of a weight is the dot product of that pair's `y` with the
    gradient of the row, so `y` is kept.

    Arguments:
        y: [N, H]; weights: [M, k].

    Returns:
        [M, H] in the dtype of `y`.
    """
    return _Combine.apply(y, weights, pairs)  # type: ignore[no-any-return]


def _inverse(order: Tensor, size: int, missing: int) -> Tensor:
    """Where each of `size` numbers stands in `order`, which has none twice; `missing` if nowhere."""
    place = torch.full((size,), missing, dtype=torch.int64, device=order.device)
    return place.index_copy(0, order, torch.arange(order.shape[0], device=order.device))


def _of_slot(y: Tensor, pairs: Pairs, j: int) -> Tensor:
    """The pair of slot `j` of each row, in wide precision; zeros where there is none."""
    place, n = pairs.place[:, j], y.shape[0]
    if n == 0:
        return y.new_zeros((place.shape[0], *y.shape[1:]), dtype=wide(y.dtype))
    if pairs.whole:
        return y.index_select(0, place).to(wide(y.dtype))
    there = (place < n).view(-1, *[1] * (y.dim() - 1))
    return torch.where(there, y.index_select(0, place.clamp(max=n - 1)).to(wide(y.dtype)), 0.0)


def _sum(y: Tensor, pairs: Pairs, weights: Tensor | None = None) -> Tensor:
    """The sum over the pairs of each row, in wide precision and rounded once to the dtype of `y`.

    Arguments:
        weights: [M, k], by which each slot's pair is multiplied; wide.
    """
    rows, k = pairs.place.shape
    if weights is None and k == 1 and pairs.whole:
        return y.index_select(0, pairs.place[:, 0])
    dtype = wide(y.dtype) if weights is None else weights.dtype
    if _pair_by_pair(y):
        each = y.to(dtype) if weights is None else y * weights.flatten()[pairs.slots][:, None]
        return y.new_zeros((rows, *y.shape[1:]), dtype=dtype).index_add_(0, pairs.rows, each).to(y.dtype)
    total = None
    for j in range(k):
        part = _of_slot(y, pairs, j) if weights is None else weights[:, j, None] * _of_slot(y, pairs, j)
        total = part if total is None else total + part
    assert total is not None
    return total.to(y.dtype)


def _pair_by_pair(y: Tensor) -> bool:
    """Whether rows are added to as pairs come, without work for slots that have none: elsewhere `index_add_` uses atomics."""
    return y.device.type == "cpu"


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x.index_select(0, pairs.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first("experts")
        return _sum(grad, ctx.pairs), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return _sum(y, pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first("experts")
        return grad.index_select(0, ctx.pairs.rows), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.pairs = pairs
        return _sum(y, pairs, weights.to(wide(torch.promote_types(y.dtype, weights.dtype))))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        require_first("experts")
        y, weights = ctx.saved_tensors
        pairs, dtype = ctx.pairs, wide(torch.promote_types(y.dtype, weights.dtype))
        dy = dw = None
        if ctx.needs_input_grad[0]:
            heavy = weights.flatten()[pairs.slots].to(dtype)
            dy = (heavy[:, None] * grad.index_select(0, pairs.rows)).to(y.dtype)
        if ctx.needs_input_grad[1]:
            dots = (y.to(dtype) * grad.index_select(0, pairs.rows)).sum(-1)
            dw = dots.new_zeros(weights.numel()).index_copy_(0, pairs.slots, dots).view_as(weights).to(weights.dtype)
        return dy, dw, None
