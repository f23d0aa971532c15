"""Embedding lookup in a table whose rows are split across ranks: each rank returns a summand of the result.

table [V, D] -> S(0) on tp;  ids R on tp;  output P on tp: rows held elsewhere are zero, nothing is communicated
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.ids import locate, require_in_range
from meshplan.runtime.comm import AxisGroup, chunk_offset, chunk_sizes


def embedding(
    ids: Tensor,
    weight_local: Tensor,
    *,
    group: AxisGroup,
    vocab_size: int,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    max_norm: float | None = None,
    sparse: bool = False,
) -> Tensor:
    """This rank's summand of `torch.nn.functional.embedding`: the sum over `group` is the lookup, bit for bit.

    Every call owns its mask, so that two tables, or two calls of one table, never see each other's. The gradient of
    `weight_local` needs the *full* gradient of the output on every rank (it is `R` there), and no collective.

    Arguments:
        ids: integer tensor of any shape, global ids, equal on all ranks of `group`.
        weight_local: `[V_local, D]`, with V_local this rank's entry of `chunk_sizes(vocab_size, group.size)`,
            which may be 0.
        group: the ranks over which rows are split.
        vocab_size: global number of rows.
        padding_idx: global row (negative counts from the end) whose gradient is zero.

    Returns:
        `[*ids.shape, D]`, dtype of the table; `P` on the group's axis.

    Raises:
        PlanError: `embedding-option` for max_norm (it rewrites the table in forward), scale_grad_by_freq (it needs
            global frequencies) and sparse; `vocab-shard-size`; `padding-idx`.
        IndexError: an id outside `[0, vocab_size)` (on the CPU, outside compilation).
    """
    options = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    for option, asked in options.items():
        if asked:
            raise PlanError(
                f"an embedding whose rows are split on {group.axis} cannot honour {option}",
                code="embedding-option",
                legal=f"an embedding without {option}, or one that is not split by rows",
            )
    rows = chunk_sizes(vocab_size, group.size)[group.rank]
    if weight_local.dim() != 2 or weight_local.shape[0] != rows:
        raise PlanError(
            f"the embedding table has shape {list(weight_local.shape)}; rank {group.rank} of {group.size} on "
            f"{group.axis} holds {rows} of {vocab_size} rows",
            code="vocab-shard-size",
            legal=f"a table laid out S(0) on {group.axis}",
        )
    require_in_range(ids, vocab_size, "index out of range in self")
    if rows == 0:
        # A sum over no rows: zeros that keep the empty shard in the autograd graph.
        return weight_local.sum(0).expand(*ids.shape, weight_local.shape[1])
    row, inside = locate(ids, group, vocab_size)
    found = F.embedding(row, weight_local, padding_idx=_local_padding(padding_idx, group, vocab_size, rows))
    # masked_fill, not a product: its backward also cuts off nan and inf that belong to other ranks' rows.
    return found.masked_fill(~inside.unsqueeze(-1), 0.0)


def collectives() -> list[Call]:
    """What one `embedding` call communicates, forward and backward: nothing. Its output is a partial sum."""
    return []


def _local_padding(padding_idx: int | None, group: AxisGroup, vocab_size: int, rows: int) -> int | None:
    """The padding row inside this rank's shard, or None if another rank holds it."""
    if padding_idx is None:
        return None
    if not -vocab_size <= padding_idx < vocab_size:
        raise PlanError(
            f"padding_idx {padding_idx} is outside an embedding of {vocab_size} rows",
            code="padding-idx",
            legal=f"{-vocab_size} to {vocab_size - 1}",
        )
    row = padding_idx % vocab_size - chunk_offset(vocab_size, group.size, group.rank)
    return row if 0 <= row < rows else None
