"""Rules of whole torch functions (linear, matmul, einsum, attention, norms, losses, dropout), before torch decomposes them.

A function listed here is one op to the compiler. Some strategies need a semantic operator in the function's place:
they name it in `Strategy.replace`, and `meshplan.ops` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshplan.compiler.kinds import A, I, Kind, P
from meshplan.compiler.rules import losses, samples, views
from meshplan.compiler.rules.base import REP, Op, Rule, Strategy, broadcast, linear_in
from meshplan.ops.attention.flex import flex_call
from meshplan.ops.attention.sinks import sink_attention
from meshplan.plan.placements import Shard


def linear(op: Op, n: int) -> list[Strategy]:
    """`x[..., k] @ w[n, k].T + b[n]`: batch dims, columns (w dim 0), rows (w dim 1: partial sum), partial input."""
    x = op.ins[0]
    last = x.dim() - 1
    bias: tuple[Kind, ...] = (REP,) if len(op.ins) == 3 else ()
    out = op.outs[0].dim() - 1
    found = [Strategy((Shard(d), REP, *bias), (Shard(d),)) for d in range(last)]
    found.append(Strategy((REP, Shard(0), *((Shard(0),) * len(bias))), (Shard(out),)))
    # The bias of a row-split linear enters the sum once: it too is a partial value (rank 0's copy and zeros).
    found.append(Strategy((Shard(last), Shard(1), *((P,) * len(bias))), (P,)))
    for kind in (P, A):
        found.append(Strategy((kind, REP, *((kind if kind == P else REP,) * len(bias))), (kind,)))
    return found


def matmul(op: Op, n: int) -> list[Strategy]:
    """torch.matmul with its batch broadcasting: batch dims, rows, columns, or the contracted dim (partial sum)."""
    a, b = op.ins
    found: list[Strategy] = []
    out = op.outs[0].dim()
    if a.dim() >= 2 and b.dim() >= 2:
        batch = op.outs[0].shape[:-2]
        for kinds, d in broadcast([_batch_of(a), _batch_of(b)], batch):
            found.append(Strategy(kinds, (Shard(d),)))
    if a.dim() >= 2:
        to = out - 2 if b.dim() >= 2 else out - 1
        found.append(Strategy((Shard(a.dim() - 2), REP), (Shard(to),)))
    if b.dim() >= 2:
        found.append(Strategy((REP, Shard(b.dim() - 1)), (Shard(out - 1),)))
    found.append(Strategy((Shard(a.dim() - 1), Shard(max(b.dim() - 2, 0))), (P,)))
    return found + linear_in(op, 0) + linear_in(op, 1)


def _batch_of(t: torch.Tensor) -> torch.Tensor:
    return t[..., 0, 0]


def einsum(op: Op, n: int) -> list[Strategy]:
    """One strategy a letter: every operand that has it is sharded there; one missing from the result leaves a partial sum."""
    equation = op.args[0]
    if not isinstance(equation, str) or "." in equation:
        return []
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "->" not in equation:
        right = "".join(sorted(c for c in set("".join(terms)) if "".join(terms).count(c) == 1))
    found = []
    for letter in sorted(set("".join(terms))):
        if any(t.count(letter) > 1 for t in terms):
            continue
        ins = tuple(Shard(t.index(letter)) if letter in t else REP for t in terms)
        found.append(Strategy(ins, (Shard(right.index(letter)) if letter in right else P,)))
    return found + [s for i in range(len(op.ins)) for s in linear_in(op, i)]


def attention(op: Op, n: int) -> list[Strategy]:
    """scaled_dot_product_attention: batch or heads. Under grouped queries both head counts must divide, so that every
    rank holds whole groups; the mask follows where it has the dim."""
    q, k = op.ins[0], op.ins[1]
    nd = q.dim()
    mask = op.ins[3] if len(op.ins) > 3 else None
    dropout = op.arg(4, "dropout_p", 0.0)
    replace = "attention_dropout" if dropout else None
    found = []
    for d in range(nd - 2):
        heads = nd >= 4 and d == nd - 3
        if heads and (q.shape[d] % n or k.shape[d] % n):
            found += _few_key_heads(op, d, n, mask, replace)
            continue
        if not heads and len({t.shape[d] for t in op.ins[:3]}) != 1:
            continue
        ins: list[Kind] = [Shard(d)] * 3
        if mask is not None:
            own = d - (nd - mask.dim())
            ins.append(Shard(own) if own >= 0 and mask.shape[own] != 1 else REP)
        found.append(Strategy(tuple(ins), (Shard(d),), replace))
    return found


def _few_key_heads(op: Op, d: int, n: int, mask: torch.Tensor | None, replace: str | None) -> list[Strategy]:
    """Fewer key heads than ranks: each is copied to the neighbouring ranks that hold its query heads."""
    q, k = op.ins[0], op.ins[1]
    if q.shape[d] % n or n % k.shape[d] or k.shape[d] < 2 or not op.arg(7, "enable_gqa", False):
        return []
    few = Shard(d, None, n // k.shape[d])
    rest: list[Kind] = []
    if mask is not None:
        own = d - (q.dim() - mask.dim())
        rest.append(Shard(own) if own >= 0 and mask.shape[own] != 1 else REP)
    return [Strategy((Shard(d), few, few, *rest), (Shard(d),), replace)]


def attention_over(op: Op, operator: str) -> list[Strategy]:
    """Self attention whose query, key and value are split along the sequence: `operator` runs it. The mask has the rows of
    this rank's queries and the columns of all keys."""
    q, k = op.ins[0], op.ins[1]
    row = q.dim() - 2
    if q.dim() != 4 or q.shape[row] != k.shape[row]:
        return []
    ins: list[Kind] = [Shard(row)] * 3
    if len(op.ins) > 3:
        mask = op.ins[3]
        own = mask.dim() - 2
        ins.append(Shard(own) if own >= 0 and mask.shape[own] != 1 else REP)
    return [Strategy(tuple(ins), (Shard(row),), operator)]


def flex(op: Op, n: int) -> list[Strategy]:
    """flex_attention: as attention without a mask tensor. A mask function is handed what it captured whole; where the batch is
    split it may do with its own rows. One that counts batch elements or heads has to know which a rank holds."""
    program, captured = op.args[3], op.ins[3:]
    found = []
    for s in attention(_without_mask(op), n):
        (out,) = s.outs
        assert isinstance(out, Shard)
        rows = frozenset() if program is None or out.dim or program.counts_batch else program.batch_rows
        if any(captured[i].shape[0] != op.ins[0].shape[0] for i in rows):
            continue
        own: list[Kind] = [Shard(0) if i in rows else REP for i in range(len(captured))]
        counts = program is not None and (program.counts_batch, program.per_head)[out.dim]
        found.append(Strategy((*s.ins, *own), s.outs, "flex_attention" if counts else None))
    return found


def flex_over(op: Op, operator: str) -> list[Strategy]:
    """`attention_over` of flex_attention: the mask function is evaluated for the rows of a rank's queries."""
    rest = (REP,) * (len(op.ins) - 3)
    return [Strategy((*s.ins, *rest), s.outs, operator) for s in attention_over(_without_mask(op), operator)]


def _without_mask(op: Op) -> Op:
    q, k, v, _, scale, enable_gqa = op.args[:6]
    return Op(op.name, (q, k, v, None, 0.0, False, scale, enable_gqa), {}, op.ins[:3], op.outs)


def sinks(op: Op, n: int) -> list[Strategy]:
    """sink_attention: as attention, where sinks go with the query heads; and rows of queries that see what a mask says of all
    keys."""
    plain = _without_sinks(op)
    found = [_with_sinks(s, Shard(0) if s.outs[0] == Shard(1) else REP) for s in attention(plain, n)]
    if not op.arg(5, "is_causal", False):
        found += [Strategy((s.ins[0], REP, REP, *s.ins[3:]), s.outs) for s in sinks_over(op, "")]
    return found


def sinks_over(op: Op, operator: str) -> list[Strategy]:
    """`attention_over` of sink_attention: every rank has the sinks of its heads."""
    return [_with_sinks(s, REP) for s in attention_over(_without_sinks(op), operator)]


def _without_sinks(op: Op) -> Op:
    mask, is_causal, scale, enable_gqa = (op.arg(i, k, d) for i, k, d in _SINK_OPTIONS)
    args = (*op.args[:3], mask, 0.0, is_causal, scale, enable_gqa)
    return Op(op.name, args, {}, (*op.ins[:3], *op.ins[4:]), op.outs)


_SINK_OPTIONS = ((4, "attn_mask", None), (5, "is_causal", False), (6, "scale", None), (7, "enable_gqa", False))


def _with_sinks(s: Strategy, kind: Kind) -> Strategy:
    return Strategy((*s.ins[:3], kind, *s.ins[3:]), s.outs, s.replace)


def layer_norm(op: Op, n: int) -> list[Strategy]:
    """layer_norm and rms_norm: any dim before the normalised ones, with weight and bias replicated."""
    x = op.ins[0]
    shape = op.arg(1, "normalized_shape")
    normed = len(shape) if isinstance(shape, (list, tuple, torch.Size)) else 1
    rest = (REP,) * (len(op.ins) - 1)
    found = [Strategy((Shard(d), *rest), (Shard(d),)) for d in range(x.dim() - normed)]
    if normed == 1:
        last = x.dim() - 1
        found.append(Strategy((Shard(last),) + (Shard(0),) * len(rest), (Shard(last),), "split_norm"))
    return found


def embedding(op: Op, n: int) -> list[Strategy]:
    """F.embedding(ids, weight): ids anywhere; the table's columns; its rows by masking (partial sum)."""
    ids, _ = op.ins
    found = [Strategy((Shard(d), REP), (Shard(d),)) for d in range(ids.dim())]
    found.append(Strategy((REP, Shard(1)), (Shard(ids.dim()),)))
    found.append(Strategy((REP, Shard(0)), (P,), "embedding"))
    return found


def cross_entropy(op: Op, n: int) -> list[Strategy]:
    """F.cross_entropy: tokens split (counts are global: a mean over data axes) or classes split (no gathered logits)."""
    logits, target = op.ins[0], op.ins[1]
    reduction = op.arg(6, "reduction", "mean")
    rest = (REP,) * (len(op.ins) - 2)
    classes = 0 if logits.dim() == 1 else 1
    found = []
    # Batch dims of the logits, and where they are in the target and in an unreduced loss.
    for d in range(logits.dim()):
        if d == classes:
            continue
        own = d if d < classes else d - 1
        if target.dtype.is_floating_point:
            continue
        # The operator scales sums and means so that their mean over the axis is the single-device value.
        out: Kind = Shard(own) if reduction == "none" else A
        found.append(Strategy((Shard(d), Shard(own), *rest), (out,), "cross_entropy"))
    # Every rank ends with the same loss and must be given the same gradient of it: invariant.
    found.append(Strategy((Shard(classes), REP, *rest), (I,), "cross_entropy"))
    return found


def dropout(op: Op, n: int) -> list[Strategy]:
    """Dropout: the mask is a function of the element's global index, so any dim may be sharded."""
    x = op.ins[0]
    p, training = op.arg(1, "p", 0.5), op.arg(2, "training", True)
    live = bool(training) and p > 0
    return [Strategy((Shard(d),), (Shard(d),), "dropout" if live else None) for d in range(x.dim())]


def pad(op: Op, n: int) -> list[Strategy]:
    """F.pad: any dim that is not padded. Reflections and the like want no empty batch."""
    x, widths = op.ins[0], list(op.arg(1, "pad"))
    padded = {x.dim() - 1 - k // 2 for k, w in enumerate(widths) if w}
    constant = op.arg(2, "mode", "constant") == "constant"
    zero = constant and not op.arg(3, "value", None)
    free = [d for d in range(x.dim()) if d not in padded and (constant or samples.filled(x.shape[d], n))]
    found = [Strategy((Shard(d),), (Shard(d),)) for d in free]
    return found + (linear_in(op, 0) if zero else [])


def conv(op: Op, n: int) -> list[Strategy]:
    """Convolutions: the batch, the output channels, and the input channels (partial sum; no groups). Depthwise: channels."""
    x, w = op.ins[0], op.ins[1]
    bias = len(op.ins) == 3
    groups = op.arg(6, "groups", 1)
    spatial = w.dim() - 2
    batched = x.dim() == spatial + 2
    c = 1 if batched else 0
    found = []
    if batched and samples.filled(x.shape[0], n):
        found.append(Strategy((Shard(0), REP, *((REP,) * bias)), (Shard(0),)))
    if groups == 1:
        if samples.filled(w.shape[0], n):
            found.append(Strategy((REP, Shard(0), *((Shard(0),) * bias)), (Shard(c),)))
        if samples.filled(w.shape[1], n):
            found.append(Strategy((Shard(c), Shard(1), *((P,) * bias)), (P,)))
    return found


def whole(op: Op, n: int) -> list[Strategy]:
    """Not done on shards: meshgrid, whose results take their sizes from all of its arguments."""
    return []


_T = torch.Tensor
RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear,
    **dict.fromkeys(
        (torch.matmul, _T.matmul, _T.__matmul__, _T.__rmatmul__, torch.bmm, _T.bmm, torch.mm, _T.mm), matmul
    ),
    **dict.fromkeys((torch.mv, _T.mv, torch.dot, _T.dot), matmul),
    torch.einsum: einsum,
    torch.functional.einsum: einsum,
    F.scaled_dot_product_attention: attention,
    flex_call: flex,
    sink_attention: sinks,
    **dict.fromkeys((F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm), layer_norm),
    F.embedding: embedding,
    F.cross_entropy: cross_entropy,
    F.dropout: dropout,
    F.pad: pad,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), conv),
    torch.meshgrid: whole,
    _T.expand_as: views.expand_as,
    **dict.fromkeys((_T.view_as, _T.reshape_as), views.reshape_as),
    **losses.RULES,
    **samples.RULES,
}
LIKE = frozenset((_T.expand_as, _T.view_as, _T.reshape_as))
"""Views that take nothing but sizes from another tensor."""

OVER = {F.scaled_dot_product_attention: attention_over, flex_call: flex_over, sink_attention: sinks_over}
"""The attention of a whole sequence that an operator of the plan's `context` can run."""
# Argument names, so that keyword calls and positional calls are one op. `__rmatmul__(a, b)` is `b @ a`.
SIGNATURES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.scaled_dot_product_attention: (
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "enable_gqa",
    ),
    sink_attention: ("query", "key", "value", "sinks", "attn_mask", "is_causal", "scale", "enable_gqa"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    torch.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    F.cross_entropy: (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    ),
    F.dropout: ("input", "p", "training", "inplace"),
    F.pad: ("input", "pad", "mode", "value"),
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d), ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    ),
    **dict.fromkeys((torch.matmul, torch.bmm, torch.mm), ("input", "other")),
    **losses.SIGNATURES,
    **samples.SIGNATURES,
}
