"""What experts are given and return: the checks that all ways to dispatch share, and how their sizes reach the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.spec import divisors
from meshplan.runtime.comm import AxisGroup

Body = Callable[[Tensor, tuple[int, ...]], Tensor]
"""`body(x [N, H], counts) -> [N, H]`: this rank's experts on rows that are sorted by expert, `counts[e]` rows for its e-th. The
counts are plain integers: the host had to know them to receive the rows. Called at every step on every rank, with N = 0 too; its
result then depends on its parameters through autograd as ever, so that an idle expert's gradient is zero and not missing."""


class Routing(NamedTuple):
    """Tokens [T, H], the experts of each, integers [T, k], and their weights [T, k]."""

    tokens: Tensor
    indices: Tensor
    weights: Tensor


class Job(NamedTuple):
    """What every way to dispatch is told beside tokens.

    Attributes:
        body: this rank's experts; experts: how many there are on all ranks of `group`.
        payload: what dispatched rows are on the wire (see `payload.py`).
        meanwhile: run while they are under way.
    """

    body: Body
    experts: int
    group: AxisGroup
    payload: str | None = None
    meanwhile: Callable[[], object] | None = None


def check(x: Routing, experts: int, group: AxisGroup) -> None:
    """Raises PlanError `experts-shape` and `experts-split`."""
    tokens, indices, weights = x
    shaped = tokens.dim() == 2 and indices.dim() == 2 and indices.shape[0] == tokens.shape[0] and indices.shape[1] > 0
    if not shaped or weights.shape != indices.shape or indices.dtype not in (torch.int64, torch.int32):
        raise PlanError(
            f"experts got tokens {list(tokens.shape)}, indices {list(indices.shape)} ({indices.dtype}) and weights "
            f"{list(weights.shape)}",
            code="experts-shape",
            legal="tokens [T, H], integer indices [T, k] and weights [T, k], k at least 1",
        )
    if experts < 1 or experts % group.size:
        near = divisors(experts) or [1]
        raise PlanError(
            f"{experts} experts cannot be split over {group.size} ranks on {group.axis}",
            code="experts-split",
            legal=f"{group.axis}: " + ", ".join(str(d) for d in near),
        )


def apply_body(body: Body, x: Tensor, counts: Sequence[int]) -> Tensor:
    """The experts' result, in the dtype of `x` (under autocast they compute in another). Raises PlanError `experts-shape` if it
    has not the shape of `x`."""
    y = body(x, tuple(counts))
    if y.shape != x.shape:
        raise PlanError(
            f"experts made {list(y.shape)} of {list(x.shape)}", code="experts-shape", legal="a row for every row"
        )
    return y.to(x.dtype)


def refuse_indices(bad: bool, experts: int) -> None:
    """Raises PlanError `expert-index` if `bad`."""
    if bad:
        raise PlanError(
            f"tokens on some rank are routed to experts that do not exist; there are {experts}",
            code="expert-index",
            legal=f"0 to {experts - 1}, or a negative index for a choice that no expert takes",
        )


def host(x: Tensor) -> list[list[list[int]]]:
    """`x` as nested lists: waits for the device."""
    return x.tolist()  # type: ignore[no-any-return]


def spread(total: int, parts: int) -> list[int]:
    """`total` as evenly over `parts` as integers can be."""
    return [total // parts + (i < total % parts) for i in range(parts)]


class Even(NamedTuple):
    """The routing that shape-only ranks assume for their tokens.

    Attributes:
        counts: choices for each expert.
        unique: tokens with an expert on a rank, as far as it has that many choices.
        k: choices that a token has at most.
    """

    counts: tuple[int, ...]
    unique: int
    k: int

    @classmethod
    def of(cls, tokens: int, k: int, experts: int, ranks: int) -> Even:
        """Choices spread evenly; as many ranks a token as experts chosen at random have, in the mean."""
        return cls(tuple(spread(tokens * k, experts)), round(tokens * (1 - (1 - 1 / ranks) ** k)), k)

    def by_rank(self, ranks: int) -> list[list[int]]:
        """The counts of each rank's experts."""
        local = len(self.counts) // ranks
        return [list(self.counts[i * local : (i + 1) * local]) for i in range(ranks)]

    def rows_by_rank(self, ranks: int) -> list[list[int]]:
        """The same behind the number of tokens that go to the rank: no more than choices, and no fewer than have as many."""
        return [[max(min(self.unique, sum(row)), -(-sum(row) // self.k)), *row] for row in self.by_rank(ranks)]
