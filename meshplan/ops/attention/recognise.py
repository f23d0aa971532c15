"""A mask given as a tensor that lets see by position and document alone, told from its values.

transformers hands sliding windows and packed documents over as boolean tensors. Where each row of such a tensor is one stretch of
columns, and the stretches are exactly those of a window and of documents,

    row p sees the columns from max(p - left, start of its document) to min(p + right, end of its document)

the tensor is left aside: what nobody sees is then skipped, zigzag halves and whole hops, and any kernel may compute the rest. All
else stays a tensor. Nothing is guessed: the stretches of all rows are compared with the formula, all columns with the stretches.
A rank decides for its own rows, since the exchanges are the same whatever the mask. On CUDA the host waits for the values once.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import replace

import torch
from torch import Tensor

from meshplan import compat
from meshplan.ops.attention.mask import Mask
from meshplan.ops.attention.sequence import Run


def by_position(mask: Mask, runs: Listing[Run], batch: int) -> Mask:
    """`mask` with its boolean bias told as `left`, `right` and `docs`, if it is such a one; otherwise `mask` itself.

    Arguments:
        runs: where the rows of the bias stand in the whole sequence.
        batch: of the queries.

    `left` and `right` are the widest stretches among these rows, and hold for no others.
    """
    bias = mask.bias
    if bias is None or bias.dtype != torch.bool or (mask.left, mask.right, mask.docs) != (None, None, None):
        return mask
    if torch.compiler.is_compiling() or bias.is_meta or compat.is_fake(bias):
        return mask
    bias = _one_of_equals(bias)
    rows = sum(stop - start for start, stop in runs)
    if bias.shape[1] > 1 or bias.shape[2] != rows or rows == 0:
        return mask
    found = _stretches(bias[:, 0])
    if found is None:
        return mask
    first, last = (x.cpu() for x in found)
    at = torch.cat([torch.arange(start, stop) for start, stop in runs])
    size = bias.shape[3]
    left, right = int((at - first).max()), int((last - at).max())
    if left < 0 or right < 0:  # a row that does not see itself, nor what is beside it
        return mask
    docs = torch.stack([_documents(*both, at, left, right, size) for both in zip(first, last, strict=True)])
    for ids, low, high in zip(docs, first, last, strict=True):
        starts = torch.searchsorted(ids, ids[at])
        ends = torch.searchsorted(ids, ids[at], right=True) - 1
        if not (torch.equal(low, starts.maximum(at - left)) and torch.equal(high, ends.minimum(at + right))):
            return mask
    whole = None if bool((docs == 0).all()) else docs.to(bias.device).expand(batch, -1)
    return replace(mask, left=left, right=right, docs=whole, bias=None)


def _one_of_equals(bias: Tensor) -> Tensor:
    """`bias` [b, h, rows, S] with one of what it shares over batch or heads."""
    for dim in (0, 1):
        if bias.stride(dim) == 0:
            bias = bias.narrow(dim, 0, 1)
    return bias


def _stretches(seen: Tensor) -> tuple[Tensor, Tensor] | None:
    """First and last column that each row of `seen` [b, rows, S] sees; None unless it sees those and all between them."""
    flags = seen.view(torch.uint8)
    first, last = flags.argmax(-1), seen.shape[-1] - 1 - flags.flip(-1).argmax(-1)  # of equals argmax gives the first
    many = flags.sum(-1, dtype=torch.int32)
    return (first, last) if bool(((many > 0) & (many == last - first + 1)).all()) else None


def _documents(first: Tensor, last: Tensor, at: Tensor, left: int, right: int, size: int) -> Tensor:
    """int64 [S]: the document of each position, cut where a row at `at` begins or ends to see and neither the window nor the
    sequence does: from 0 on, and in order."""
    begun = first[first > (at - left).clamp(min=0)]
    ended = last[last < (at + right).clamp(max=size - 1)] + 1
    cuts = torch.cat([begun, ended]).unique()
    return torch.searchsorted(cuts, torch.arange(size), right=True)
