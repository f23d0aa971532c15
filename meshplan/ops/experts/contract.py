"""What experts are given and return: the checks that all ways to dispatch share, and how their sizes reach the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.runtime.comm import AxisGroup

Body = Callable[[Tensor, tuple[int, ...]], Tensor]
"""`body(x [N, H], counts) -> [N, H]`: this rank's experts on rows that are sorted by expert, `counts[e]` rows for its e-th. The
counts are plain integers: the host had to know them to receive the rows. Called at every step on every rank, with N = 0 too; its
result then depends on its parameters through autograd as ever, so that an idle expert's gradient is zero and not missing."""


def check(tokens: Tensor, indices: Tensor, weights: Tensor, experts: int, group: AxisGroup) -> None:
    """Raises PlanError `experts-shape` and `experts-split`."""
    shaped = tokens.dim() == 2 and indices.dim() == 2 and indices.shape[0] == tokens.shape[0] and indices.shape[1] > 0
    if not shaped or weights.shape != indices.shape or indices.dtype not in (torch.int64, torch.int32):
        raise PlanError(
            f"experts got tokens {list(tokens.shape)}, indices {list(indices.shape)} ({indices.dtype}) and weights "
            f"{list(weights.shape)}",
            code="experts-shape",
            legal="tokens [T, H], integer indices [T, k] and weights [T, k], k at least 1",
        )
    if experts < 1 or experts % group.size:
        near = sorted({d for d in range(1, experts + 1) if experts % d == 0}) or [1]
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


def balanced(shape: Sequence[int], experts: int, ranks: int, dedup: bool) -> list[list[int]]:
    """What a rank with indices of `shape` tells each rank when its choices are spread evenly; with `dedup` rows first."""
    tokens, k = shape
    local = experts // ranks
    pairs = spread(tokens * k, experts)
    rows = [pairs[i * local : (i + 1) * local] for i in range(ranks)]
    if not dedup:
        return rows
    unique = round(tokens * (1 - (1 - 1 / ranks) ** k))
    return [[min(unique, sum(row)), *row] for row in rows]
