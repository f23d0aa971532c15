"""How tokens and experts lie on ranks beside the dispatch: no token travels twice, and each is computed once.

    copies   ranks with equal tokens (tp without sequence parallelism): each dispatches a share, and results are gathered
    etp      ranks that hold a part of each expert (of its inner width): they need equal tokens, and results are summands

What is done to tokens and weights before the dispatch, and to its result after it, each with its mate in backward, in the
letters of `runtime/boundary.py`:

                            tokens and weights                     result
    copies, kind I          I -> S   slice, all_gather             S -> I   all_gather, slice
    copies, kind R          R -> S   slice, zeros                  S -> R   all_gather, reduce_scatter
    etp, tokens of its own  S -> R   all_gather, reduce_scatter    P -> S   reduce_scatter, all_gather
    etp, copies, kind I     I -> R   nothing, all_reduce           P -> I   all_reduce, nothing
    etp, copies, kind R     R        nothing, nothing              P -> R   all_reduce, all_reduce

Kind I (invariant): the result's gradient comes equal on the ranks with copies, and so go those of tokens and weights. It is right
where all of them run one router and one loss. Kind R: the result's gradient is a summand on each rank, and so are those of tokens
and weights, for whoever reduces them later together with others.

Tokens are cut as `torch.chunk` cuts: fewer tokens than ranks leave some with none. Where an expert's last matmul has a bias,
one rank of etp adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.experts.contract import Routing
from meshplan.ops.experts.uneven import padded, sizes_of
from meshplan.runtime.boundary import move
from meshplan.runtime.comm import AxisGroup

KINDS = ("I", "R")


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Which ranks hold the same tokens, and which hold parts of the same experts.

    Attributes:
        copies: ranks with the same tokens, indices and weights, of which each is to dispatch a share; without those of `etp`.
        etp: ranks that split each expert.
        etp_copies: whether these hold the same tokens too; else each has tokens of its own.
        equal: etp ranks with tokens of their own have equally many, and do not ask each other.
        kind: `I` or `R`, of what ranks hold copies of (see above).

    Raises PlanError `bad-value` for another kind.
    """

    copies: AxisGroup | None = None
    etp: AxisGroup | None = None
    etp_copies: bool = False
    equal: bool = False
    kind: str = "I"

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    def around(self, x: Routing, dispatch: Callable[[Routing], Tensor]) -> Tensor:
        """`dispatch` of what this rank is to send, and of its result [T', H] this rank's [T, H]."""
        if self.copies is None or self.copies.size == 1:
            return self._over_etp(x, dispatch)
        out = self._over_etp(split_tokens(x, self.copies, self.kind), dispatch)
        return join_tokens(out, x.tokens.shape[0], self.copies, self.kind)

    def _over_etp(self, x: Routing, dispatch: Callable[[Routing], Tensor]) -> Tensor:
        etp = self.etp
        if etp is None or etp.size == 1:
            return dispatch(x)
        if self.etp_copies:
            if self.kind == "I":
                # Tokens before weights: backward walks from the last to the first, on every rank alike.
                x = x._replace(tokens=move(x.tokens, "I", "R", etp))
                x = x._replace(weights=move(x.weights, "I", "R", etp))
            return move(dispatch(x), "P", self.kind, etp)
        size = x.tokens.shape[0]
        most = size if self.equal else max(sizes_of(x.tokens, etp))
        etp = etp if self.equal else etp.uneven()
        whole = most * etp.size
        tokens = move(padded(x.tokens, most), "S", "R", etp, size=whole)
        weights = move(padded(x.weights, most), "S", "R", etp, size=whole)
        indices = etp.all_gather(padded(x.indices, most, -1), 0)
        return move(dispatch(Routing(tokens, indices, weights)), "P", "S", etp, size=whole)[:size]


def split_tokens(x: Routing, group: AxisGroup, kind: str = "I") -> Routing:
    """This rank's share of tokens that all ranks of `group` hold: rows `torch.chunk` gives it, maybe none.

    Backward: of kind I, gradients [T, ...] of all ranks' shares, equal on all; of kind R, zeros but for this share.

    Raises:
        PlanError: `bad-value` for another kind.
    """
    _check_kind(kind)
    # Tokens before weights, as above.
    tokens = move(x.tokens, kind, "S", group, size=x.tokens.shape[0])
    weights = move(x.weights, kind, "S", group, size=x.weights.shape[0])
    return Routing(tokens, group.shard(x.indices, 0), weights)


def join_tokens(out: Tensor, size: int, group: AxisGroup, kind: str = "I") -> Tensor:
    """All `size` rows of what `split_tokens` cut, on every rank of `group`.

    Backward: of kind I, this rank's rows of a gradient that is equal on all; of kind R, of the sum of all ranks' gradients.

    Raises:
        PlanError: `bad-value` for another kind.
    """
    _check_kind(kind)
    return move(out, "S", kind, group, size=size)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PlanError(f"tokens that ranks hold copies of have no kind {kind!r}", code="bad-value", legal=list(KINDS))
