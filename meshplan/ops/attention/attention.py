"""Scaled dot-product attention of a sequence that is split over ranks: the drop-in for torch's, on local shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.streams import Key
from meshplan.ops.attention import block as plain
from meshplan.ops.attention.allgather import allgather_attention
from meshplan.ops.attention.dropped import Dropped
from meshplan.ops.attention.mask import Mask
from meshplan.ops.attention.offsets import documents_of
from meshplan.ops.attention.recognise import by_position
from meshplan.ops.attention.ring import Ring, ring_attention
from meshplan.ops.attention.sequence import Run, Sequence
from meshplan.ops.attention.travel import TRANSPORTS
from meshplan.ops.attention.ulysses import hybrid_attention, ulysses_attention
from meshplan.ops.dropout import Runs
from meshplan.runtime.comm import AxisGroup

METHODS = ("ring", "allgather", "ulysses", "hybrid")


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: AxisGroup,
    sequence: Sequence,
    method: str = "ring",
    transport: str = "send",
    inner_group: AxisGroup | None = None,
    outer_group: AxisGroup | None = None,
    left: int | None = None,
    right: int | None = None,
    docs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sees: Callable[[Run, Tensor], Tensor] | None = None,
    sink: Tensor | None = None,
    stream: Key | None = None,
    global_shape: Listing[int] | None = None,
    offsets: Listing[int | Runs] = (0, 0),
    keep_gathered: bool = False,
    equal_heads: int = 1,
    block: Any = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of the whole sequence, for this rank's queries.

    All restrictions hold at once. All ranks make the same collectives, whatever the mask. Scores, softmax and sums of
    half-precision inputs are in float32; the result is rounded once. Rows that see nothing give zero, as in torch.

    Arguments:
        query: [B, H, S/n, D]; key: [B, Hkv, S/n, D]; value: [B, Hkv, S/n, Dv]: this rank's rows, in the order of `sequence`.
        attn_mask: boolean (True takes part) or floating (added), broadcast to [B, H, S/n, S]: the rows are this rank's, in local
            order (or one for all), the columns the whole sequence's in true order. A floating one may require a gradient.
        dropout_p: applied as given; pass 0 in evaluation, as with torch. Needs `stream`.
        is_causal: a position sees itself and those before it in the whole sequence.
        enable_gqa: Hkv may be a divisor of H.
        group: the ranks that hold the sequence, in rank order.
        sequence: how it lies on them.
        method: `ring`, `allgather`, `ulysses`, or `hybrid` with `inner_group` (neighbouring ranks of `group`, which exchange
            heads) and `outer_group` (those with the same place in every inner group, which form rings).
        transport: of `ring`: `send` passes keys and values on from rank to rank, `peer` pulls them out of the peers' memory.
        left, right: a position sees those at most `left` before it and `right` after it (left=w-1 and right=0: a sliding window
            of w, itself among them).
        docs: integer document of each position, negative for none: positions of different documents do not see each other. Whole
            in true order ([S] or [B, S]), or this rank's ([S/n] or [B, S/n]), which one more all_gather makes whole.
        cu_seqlens: in place of `docs`, integer [documents + 1]: where each document begins in the whole sequence, from 0 on, and
            where the last ends.
        sees: in place of `attn_mask`, what makes one wherever a rank needs it: from some of these query heads (first, past the
            last) and positions int64 [rows] of the whole sequence to boolean [B or 1, heads or 1, rows, S].
        sink: logit per head [H] that joins each row's denominator, and has no value.
        stream: key of the dropout stream.
        global_shape: [B, H, S, S] of the probabilities on one device; default: batch and heads of `query`.
        offsets: where this rank's batch and heads begin in it, or their runs.
        keep_gathered: for `allgather`: hold what was gathered until backward, instead of gathering again.
        equal_heads: key and value heads are equal in runs of so many, which divide Hkv: the first of each travels and is
            computed with, and gets the gradient of all of them (the others' is zero).
        block: what computes a block: a module with the functions of `block.py`; by default `fastest_block`. Masks that stay
            tensors (`recognise.py`) and dropout are always `block.py`'s own.

    Returns:
        [B, H, S/n, Dv] in the dtype of `query`. The gradients of shards are those of the whole; a mask, bias or sink that ranks
        have alike gets this rank's summand.

    Raises:
        PlanError: `context-shape`, `context-mask`, `attention-mask`, `attention-heads`, `context-heads`, `bad-dropout`,
            `bad-offsets`, `bad-value`.
    """
    query, key, value, attn_mask = _as_autocast(query, key, value, attn_mask)
    _check(query, key, value, enable_gqa, group, sequence, sink)
    if equal_heads > 1:
        key, value = key[:, ::equal_heads], value[:, ::equal_heads]
    if is_causal:
        if attn_mask is not None or sees is not None:
            raise PlanError(
                "attention got both attn_mask and is_causal",
                code="attention-mask",
                legal="one of them; torch refuses both",
            )
        right = 0 if right is None else min(right, 0)
    if cu_seqlens is not None:
        if docs is not None:
            raise PlanError("attention got both docs and cu_seqlens", code="context-mask", legal="one of them")
        docs = documents_of(cu_seqlens, sequence.size)
    mask = Mask(
        left,
        right,
        _whole_docs(docs, query, group, sequence),
        _bias(attn_mask, query, sequence),
        sink,
        _dropped(dropout_p, stream, global_shape, offsets, query, sequence),
        sees,
    )
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if method in ("ring", "allgather"):  # where heads are exchanged, rows are first
        mask = mask.shown((0, query.shape[1]), sequence.runs(group.rank), query.device)
        mask = by_position(mask, sequence.runs(group.rank), query.shape[0])
    if block is None:
        block = fastest_block(query.device.type, query.dtype, max(query.shape[-1], value.shape[-1]), scale)
    ring = Ring(block, scale, sequence, group, transport)
    if transport not in TRANSPORTS or (transport != "send" and method != "ring"):
        raise PlanError(
            f"context attention by {method} has no transport {transport!r}",
            code="bad-value",
            legal="send, or peer for method ring",
        )
    if method == "ring":
        return ring_attention(query, key, value, mask, ring)
    if method == "allgather":
        return allgather_attention(query, key, value, mask, ring, keep_gathered)
    if method == "ulysses":
        return ulysses_attention(query, key, value, mask, ring)
    if method == "hybrid":
        if inner_group is None or outer_group is None:
            raise PlanError(
                "hybrid context attention got no groups", code="bad-value", legal="inner_group and outer_group"
            )
        return hybrid_attention(query, key, value, mask, ring, inner_group, outer_group)
    raise PlanError(f"context attention has no method {method!r}", code="bad-value", legal=list(METHODS))


def fastest_block(device: str, dtype: torch.dtype, width: int, scale: float) -> Any:
    """The Triton kernels where they take what is at hand, torch's own operations elsewhere.

    Arguments:
        device: its type; width: the larger head dim.
    """
    if device != "cuda" or dtype == torch.float64 or width > 256 or scale <= 0:
        return plain
    try:
        from meshplan.kernels.attention import block as kernels
    except ImportError:  # a CUDA build of torch brings Triton along; others may not
        return plain
    return kernels


def _as_autocast(*tensors: Tensor | None) -> list[Any]:
    """The tensors as autocast hands them to torch's operator: on its list of lower precision, on the CPU too."""
    kind = next(x for x in tensors if x is not None).device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return list(tensors)
    low = torch.get_autocast_dtype(kind)
    wanted = [x is not None and x.is_floating_point() and x.dtype != torch.float64 for x in tensors]
    return [x.to(low) if x is not None and w else x for x, w in zip(tensors, wanted, strict=True)]


def _check(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, group: AxisGroup, sequence: Sequence, sink: Tensor | None
) -> None:
    shapes = [list(x.shape) for x in (q, k, v)]
    good = all(x.dim() == 4 for x in (q, k, v)) and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
    if not good or q.shape[0] != k.shape[0] or len({x.dtype for x in (q, k, v)}) > 1:
        raise PlanError(
            f"context attention got a query, key and value of {shapes} and {[str(x.dtype) for x in (q, k, v)]}",
            code="context-shape",
            legal="[B, H, S/n, D], [B, Hkv, S/n, D] and [B, Hkv, S/n, Dv] of one dtype",
        )
    if sequence.ranks != group.size or {q.shape[2], k.shape[2]} != {sequence.local}:
        raise PlanError(
            f"context attention got {q.shape[2]} rows of queries and {k.shape[2]} of keys; each of {group.size} ranks on "
            f"{group.axis} holds {sequence.local} of {sequence.size}",
            code="context-shape",
            legal=f"{sequence.local} rows each: self-attention of one sequence that is split over {group.axis}",
        )
    heads, own = q.shape[1], k.shape[1]
    if heads % own or (heads != own and not enable_gqa):
        raise PlanError(
            f"attention has {heads} query heads and {own} key or value heads",
            code="attention-heads",
            legal="a number of key and value heads that divides the query heads, with enable_gqa=True",
        )
    if sink is not None and list(sink.shape) != [heads]:
        raise PlanError(
            f"context attention got sinks of {list(sink.shape)}", code="context-shape", legal=f"one per head, [{heads}]"
        )


def _bias(attn_mask: Tensor | None, q: Tensor, sequence: Sequence) -> Tensor | None:
    """The mask as [b, h, rows, S], b, h and rows whole or 1."""
    if attn_mask is None:
        return None
    rows, shape = q.shape[2], list(attn_mask.shape)
    full = [1] * (4 - len(shape)) + shape
    whole = [*q.shape[:2], rows, sequence.size]
    known = attn_mask.dtype == torch.bool or attn_mask.is_floating_point()
    if not known or len(full) > 4 or any(size not in (1, most) for size, most in zip(full, whole, strict=True)):
        kind = str(attn_mask.dtype).removeprefix("torch.")
        raise PlanError(
            f"context attention got a mask {kind}{shape} for {rows} of {sequence.size} rows",
            code="context-mask",
            legal=f"boolean or floating, broadcast to {whole}: this rank's rows, all columns",
        )
    return attn_mask.view(full).expand(-1, -1, -1, sequence.size)


def _whole_docs(docs: Tensor | None, q: Tensor, group: AxisGroup, sequence: Sequence) -> Tensor | None:
    """The document of every position, [B, S] in true order."""
    if docs is None:
        return None
    batch, length = q.shape[0], docs.shape[-1] if docs.dim() else 0
    leading = list(docs.shape[:-1])
    if docs.is_floating_point() or leading not in ([], [1], [batch]) or length not in (sequence.size, sequence.local):
        raise PlanError(
            f"context attention got documents of shape {list(docs.shape)} ({docs.dtype})",
            code="context-mask",
            legal=f"integers [{batch}, {sequence.size}] in true order, or this rank's [{batch}, {sequence.local}]",
        )
    if length != sequence.size:
        docs = sequence.join(group.all_gather(docs, docs.dim() - 1).split(length, -1), docs.dim() - 1)
    return docs.expand(batch, -1)


def _dropped(
    p: float,
    stream: Key | None,
    global_shape: Listing[int] | None,
    offsets: Listing[int | Runs],
    q: Tensor,
    sequence: Sequence,
) -> Dropped | None:
    if not 0.0 <= p <= 1.0:
        raise PlanError(f"dropout probability {p} is not a probability", code="bad-dropout", legal="0 to 1")
    if p == 0.0:
        return None
    if stream is None:
        raise PlanError(
            f"context attention with dropout {p} got no stream to draw its mask from",
            code="bad-dropout",
            legal="the key of a dropout stream (DropoutStreams.key), equal on all ranks",
        )
    shape = [*q.shape[:2], sequence.size, sequence.size] if global_shape is None else global_shape
    return Dropped(p, stream, tuple(shape), *offsets)
