"""One block of attention in plain torch: a stretch of queries meets a stretch of keys, and the outcome is added up.

    forward    s = scale q k' (+ bias), m' = max(m, max s), p = e^(s - m'), c = e^(m - m'):
               l <- c l + sum p,  acc <- c acc + p v,  m <- m'                    finish: out = acc / l, lse = m + log l
    backward   p = e^(s - lse), ds = p (dout v' - delta), delta = sum(out dout):
               dq += scale ds k,  dk += scale ds' q,  dv += p' dout,  dbias += ds

(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023, section 3.) The
state of a row is float32, float64 for float64 inputs, over any number of blocks, and is rounded once by `finish`.
`meshplan.kernels.attention` keeps the same contract without bias and dropout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshplan.ops.attention.dropped import Dropped
from meshplan.ops.attention.tile import Span, Tile, tiles
from meshplan.ops.precision import wide

_INF = float("inf")


class State(NamedTuple):
    """What is known of queries that have met some keys: `acc` [B, H, Lq, Dv] unnormalised result, `m` [B, H, Lq] largest score
    (natural logarithm; -inf if nothing was seen), `l` [B, H, Lq] sum of e^(score - m)."""

    acc: Tensor
    m: Tensor
    l: Tensor

    def rows(self, start: int, stop: int) -> State:
        """The state of some of the queries: views."""
        return State(*(x.narrow(2, start, stop - start) for x in self))


def new_state(q: Tensor, v: Tensor) -> State:
    """The state of queries `q` [B, H, Lq, D] that have seen nothing yet of values like `v` [B, Hkv, Lk, Dv]."""
    rows = q.shape[:3]
    acc = q.new_zeros((*rows, v.shape[3]), dtype=wide(q.dtype))
    return State(acc, acc.new_full(rows, -_INF), acc.new_zeros(rows))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    scale: float,
    state: State,
    q_docs: Tensor | None = None,
    k_docs: Tensor | None = None,
    bias: Tensor | None = None,
    dropped: Dropped | None = None,
) -> None:
    """Fold the keys of one block into `state`, in place.

    Arguments:
        q: [B, H, Lq, D]; k: [B, Hkv, Lk, D]; v: [B, Hkv, Lk, Dv], H a multiple of Hkv. Keys are never repeated in memory.
        q_docs, k_docs: int [B, Lq] and [B, Lk], the document of each position: what is of another document, or of a negative
            one, is not seen.
        bias: boolean (True takes part) or floating (added to the scaled scores), broadcast to [B, H, Lq, Lk].
        dropped: dropout of the probabilities, which the denominator does not see.

    A block, or a part of it, that `span` does not let see each other costs nothing; one that is wholly inside it makes no mask.
    """
    for tile in tiles(q, k, span, q_docs, k_docs, bias):
        keys, values = tile.keys(k), tile.keys(v).to(state.acc.dtype)
        scores = _scores(tile.rows(q), keys, tile, scale)
        acc, m, l = state.rows(tile.q0, tile.q1)
        top = torch.maximum(m, scores.amax(-1))
        base = top.masked_fill(top == -_INF, 0.0)
        p = scores.sub_(base.unsqueeze(-1)).exp_()
        carry = m.sub(base).exp_()
        l.mul_(carry).add_(p.sum(-1))
        if dropped is not None:
            p.mul_(dropped.factor(tile.span.q_start, tile.span.k_start, p))
        acc.mul_(carry.unsqueeze(-1)).add_((_grouped(p, values) @ values).view(acc.shape))
        m.copy_(top)


def finish(state: State, dtype: torch.dtype, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result in `dtype` and the logarithm of each row's denominator, from a state that has seen all keys.

    Arguments:
        sink: a logit per head [H] that joins the denominator and has no value.

    Returns:
        out [B, H, Lq, Dv] and lse [B, H, Lq] in the precision of the state. A row that saw nothing is 0, and its lse -inf, or
        the sink.
    """
    acc, m, l = state
    if sink is not None:
        extra = sink.to(m.dtype).view(-1, 1)
        top = torch.maximum(m, extra)
        base = top.masked_fill(top == -_INF, 0.0)
        carry = (m - base).exp_()
        acc, m, l = acc * carry.unsqueeze(-1), base, l * carry + (extra - base).exp_()
    # Where nothing was seen acc and l are 0.
    out = acc / l.masked_fill(l == 0, 1.0).unsqueeze(-1)
    return out.to(dtype), m + l.log()


def delta(out: Tensor, dout: Tensor) -> Tensor:
    """sum(out dout) of each row [B, H, Lq], in wide precision: the sum of p dp over all keys, which each block needs."""
    dtype = wide(out.dtype)
    return (out.to(dtype) * dout.to(dtype)).sum(-1)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    span: Span,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_docs: Tensor | None = None,
    k_docs: Tensor | None = None,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
    dropped: Dropped | None = None,
) -> None:
    """Add the share that one block has in the gradients to `dq`, `dk`, `dv` and `dbias`, in place.

    Arguments:
        dout: [B, H, Lq, Dv]; lse: of `finish`, over all keys; delta: of `delta`.
        dq, dk, dv: like q, k, v in the precision of the state; dbias: like `bias`, the same.
        The others as in `forward`.
    """
    for tile in tiles(q, k, span, q_docs, k_docs, bias):
        dtype = dq.dtype
        queries, keys, values = tile.rows(q), tile.keys(k), tile.keys(v).to(dtype)
        upstream = _grouped(tile.rows(dout).to(dtype), values)
        norm = tile.rows(lse).unsqueeze(-1)
        # -inf, of a row that saw nothing, would make nan.
        p = _scores(queries, keys, tile, scale).sub_(norm.masked_fill(norm == -_INF, _INF)).exp_()
        dp = (upstream @ values.transpose(-1, -2)).view(p.shape)
        kept = p
        if dropped is not None:
            factor = dropped.factor(tile.span.q_start, tile.span.k_start, p)
            kept = p * factor
            dp.mul_(factor)
        tile.keys(dv).add_(_grouped(kept, values).transpose(-1, -2) @ upstream)
        ds = dp.sub_(tile.rows(delta).unsqueeze(-1)).mul_(p)
        if dbias is not None:
            part = tile.corner(dbias)
            part.add_(ds.sum_to_size(part.shape))
        ds = _grouped(ds, values).mul_(scale)
        tile.rows(dq).add_((ds @ keys.to(dtype)).view(queries.shape))
        tile.keys(dk).add_(ds.transpose(-1, -2) @ _grouped(queries.to(dtype), values))


def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float) -> Tensor:
    """Scaled scores [B, H, rows, keys] of a tile in wide precision, -inf where nothing is seen."""
    dtype = wide(q.dtype)
    queries = _grouped(q.to(dtype) * scale, k)
    scores = (queries @ k.to(dtype).transpose(-1, -2)).view(*q.shape[:3], k.shape[2])
    bias = None if tile.bias is None else tile.corner(tile.bias)
    if bias is not None and bias.dtype != torch.bool:
        scores.add_(bias.to(dtype))
        bias = None
    visible = tile.visible(q.device)
    if bias is not None:
        visible = bias if visible is None else visible & bias
    return scores if visible is None else scores.masked_fill_(~visible, -_INF)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Rows of all query heads that share a key head as rows of that one: [B, H, L, E] -> [B, Hkv, H/Hkv L, E]."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, k.shape[1], heads // k.shape[1] * length, width)
