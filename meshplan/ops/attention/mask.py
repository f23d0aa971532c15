"""What the positions of a sequence see of each other, and the walk over the stretches of it that two sides hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshplan.ops.attention.block import Span, State
from meshplan.ops.attention.dropped import Dropped
from meshplan.ops.attention.sequence import Run


@dataclass(frozen=True)
class Mask:
    """What every position sees, by several reasons at once.

    Attributes:
        left, right: a position sees those at most `left` before it and `right` after it; None is no limit.
        docs: int [B, S], the document of each position of the whole sequence, negative for none.
        bias: boolean or floating [b, h, rows, S], b, h and rows whole or 1: rows are these queries in their local order, columns
            the whole sequence in true order.
        sink: logit per head [H] that joins the denominator.
        dropped: dropout of the probabilities.
        sees: in place of a bias, what makes a boolean one for any of these query heads (first, past the last) and positions
            [rows] of the whole sequence; see `shown`.
    """

    left: int | None = None
    right: int | None = None
    docs: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    dropped: Dropped | None = None
    sees: Callable[[Run, Tensor], Tensor] | None = None

    def shown(self, heads: Run, runs: Sequence[Run], device: torch.device) -> Mask:
        """This mask with what `sees` makes for `heads` and the rows at `runs` as its bias."""
        if self.sees is None:
            return self
        rows = torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])
        return replace(self, bias=self.sees(heads, rows), sees=None)


@dataclass(frozen=True)
class _Pair:
    """A stretch of queries and one of keys, as (first, past the last) in their shards, with what the block is to know."""

    q: Run
    k: Run
    span: Span
    extras: dict[str, Any]


def fold(
    block: Any,
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_runs: Sequence[Run],
    k_runs: Sequence[Run],
    mask: Mask,
    scale: float,
) -> None:
    """Let queries that stand at `q_runs` of the sequence meet keys and values at `k_runs`; the outcome goes to `state`.

    Arguments:
        block: a module with the functions of `block.py`.
    """
    for pair in _pairs(q_runs, k_runs, mask):
        rows = State(*(_at(x, pair.q) for x in (state.acc, state.m, state.l)))
        block.forward(_at(q, pair.q), _at(k, pair.k), _at(v, pair.k), pair.span, scale, rows, **pair.extras)


def unfold(
    block: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    q_runs: Sequence[Run],
    k_runs: Sequence[Run],
    mask: Mask,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
) -> None:
    """The backward of `fold`: adds to `dq` and `dbias` (queries' rows), `dk` and `dv` (these keys')."""
    for pair in _pairs(q_runs, k_runs, mask):
        extras = pair.extras
        if dbias is not None:
            extras = extras | {"dbias": _corner(dbias, pair.q, pair.span.k_start, pair.k)}
        block.backward(
            *(_at(q, pair.q), _at(k, pair.k), _at(v, pair.k), _at(dout, pair.q), _at(lse, pair.q), _at(delta, pair.q)),
            *(pair.span, scale, _at(dq, pair.q), _at(dk, pair.k), _at(dv, pair.k)),
            **extras,
        )


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The share of these rows in the gradient of a sink [H]: its probability e^(sink - lse) times 0 - delta, summed."""
    p = (sink.to(lse.dtype).view(-1, 1) - lse.masked_fill(lse == -float("inf"), float("inf"))).exp_()
    return (p * delta).sum((0, 2)).neg_().to(sink.dtype)


def exactly(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast switched off: what is computed here is in the precision that was chosen for it."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _pairs(q_runs: Sequence[Run], k_runs: Sequence[Run], mask: Mask) -> Iterator[_Pair]:
    """The pairs of stretches of which some positions see each other."""
    q0 = 0
    for q_start, q_stop in q_runs:
        q1, k0 = q0 + q_stop - q_start, 0
        for k_start, k_stop in k_runs:
            k1 = k0 + k_stop - k_start
            span = Span(q_start, k_start, mask.left, mask.right)
            first, stop = span.keys(q1 - q0, k1 - k0)
            if first < stop:
                extras: dict[str, Any] = {}
                if mask.docs is not None:
                    extras["q_docs"] = mask.docs[:, q_start:q_stop]
                    extras["k_docs"] = mask.docs[:, k_start:k_stop]
                if mask.bias is not None:
                    extras["bias"] = _corner(mask.bias, (q0, q1), k_start, (k0, k1))
                if mask.dropped is not None:
                    extras["dropped"] = mask.dropped
                yield _Pair((q0, q1), (k0, k1), span, extras)
            k0 = k1
        q0 = q1


def _at(x: Tensor, run: Run) -> Tensor:
    return x.narrow(2, run[0], run[1] - run[0])


def _corner(bias: Tensor, rows: Run, k_start: int, keys: Run) -> Tensor:
    """The part of a [b, h, rows or 1, S] that these local rows and these keys, at `k_start` of the whole, have in it."""
    if bias.shape[2] > 1:
        bias = _at(bias, rows)
    return bias.narrow(3, k_start, keys[1] - keys[0])
