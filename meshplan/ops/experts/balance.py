"""Losses that keep routers balanced, and the counts that balance them by a bias: each exact to its definition on one device.

Every loss comes scaled as `token_mean` does it: its mean over data ranks is the value of the whole batch, and gradients averaged
over data ranks are its gradients. f_e, the share of choices that expert e got, is a constant; P_e, the mean probability, is a sum
over tokens, so a rank needs all ranks' counts, and of P only its own summand:

    load balance   E sum_e f_e P_e                    f_e = count_e / T,  P_e = sum_t p_te / T       (T of all ranks)
    rank 0: T = 1, counts (1, 0), p (.8, .2)          this rank's value   n E sum_e f_e p_e / T
    rank 1: T = 3, counts (1, 2), p sums (1.2, 1.8)   f = (.5, .5): 2 x 2 x .5 x 1 / 4 = .5, and 1.5; mean 1, as on one device

(Fedus, Zoph, Shazeer, "Switch Transformers", 2021; Zoph et al., "ST-MoE", 2022, for z; DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024, for the sequence-wise loss and the bias.) `scope="global"` is the definition on the global batch, equal under any
mesh. `"per_rank"` is the mean over ranks of each one's own loss: another loss, which depends on how the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.experts.routing import sorted_slots
from meshplan.ops.precision import wide
from meshplan.ops.token_mean import ranks_of, reduce_over, token_mean
from meshplan.runtime.comm import AxisGroup

SCOPES = ("global", "per_rank")


def load_balance_loss(
    probabilities: Tensor,
    indices: Tensor,
    *,
    groups: Sequence[AxisGroup],
    scope: str = "global",
    mask: Tensor | None = None,
    per_choice: bool = False,
    data_ranks: int | None = None,
) -> Tensor:
    """E sum_e f_e P_e, this rank's share of it.

    The batch is what one call sees: accumulated over microbatches, the sum is that of each one's own loss, not the loss of them
    together, since f and P multiply.

    Arguments:
        probabilities: [T, E], the router's softmax; those of several layers one behind the other, as Mixtral does.
        indices: integers [T, k], the experts chosen, before any is dropped.
        groups: the axes over which tokens are split, each once: one `all_reduce` of E + 1 integers for each.
        scope: `global` or `per_rank` (sends nothing).
        mask: [T], nonzero for tokens that count.
        per_choice: f_e = count_e / (T k), as Megatron and DeepSeek have it; else count_e / T, as Switch and transformers.
        data_ranks: number of ranks over which gradients are averaged, if not all of `groups` (tp ranks under sequence parallelism
            split tokens, and their gradients are summed).

    Returns:
        A 0-dim tensor in the wide dtype of the probabilities.

    Raises:
        PlanError: `experts-shape`, `bad-value`.
    """
    _check(probabilities, indices, mask, scope)
    experts, k = probabilities.shape[1], indices.shape[1]
    summed, told = _sums(probabilities, indices, mask)
    ranks: float = ranks_of(groups) if data_ranks is None else data_ranks
    if scope == "global":
        told = reduce_over(groups, told)
    else:
        ranks /= ranks_of(groups)
    tokens = told[-1].clamp(min=1).to(summed.dtype)
    shares = told[:-1].to(summed.dtype) / (tokens * (k if per_choice else 1))
    return (shares * summed).sum() * (experts / tokens) * ranks


def z_loss(
    logits: Tensor,
    *,
    groups: Sequence[AxisGroup],
    scope: str = "global",
    mask: Tensor | None = None,
    data_ranks: int | None = None,
) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2, this rank's share of it.

    Arguments:
        logits: [T, E]; others as in `load_balance_loss`; one `all_reduce` of an integer for each group.

    Raises:
        PlanError: `experts-shape`, `bad-value`.
    """
    _check(logits, None, mask, scope)
    squares = torch.logsumexp(logits.to(wide(logits.dtype)), -1).square()
    kept = None if mask is None else mask != 0
    if scope == "global":
        return token_mean(squares, kept, groups=groups, data_ranks=data_ranks)
    own = squares.shape[0] if kept is None else kept.sum()
    own = own.clamp(min=1) if isinstance(own, Tensor) else max(1, own)
    mean = token_mean(squares, kept, own, groups=(), data_ranks=1)
    return mean if data_ranks is None else mean * (data_ranks / ranks_of(groups))


def sequence_loss(
    probabilities: Tensor,
    indices: Tensor,
    *,
    batch_groups: Sequence[AxisGroup],
    sequence_groups: Sequence[AxisGroup] = (),
    mask: Tensor | None = None,
    data_ranks: int | None = None,
) -> Tensor:
    """DeepSeek's balance within each sequence, this rank's share of the mean over sequences:

        mean over b of sum_e f_be P_be,  f_be = E / (k S_b) count_be,  P_be = 1 / S_b sum over its tokens of p_te

    Arguments:
        probabilities: [B, S, E], scores divided by their sum over experts; indices: integers [B, S, k].
        batch_groups: axes over which whole sequences are split; sequence_groups: those over which each sequence is, whose ranks
            hold parts of the same ones (one `all_reduce` of B (E + 1) integers each).
        mask: [B, S], nonzero for tokens that count; a sequence without any adds nothing and is one of the mean.

    Raises:
        PlanError: `experts-shape`.
    """
    if probabilities.dim() != 3 or indices.dim() != 3 or probabilities.shape[:2] != indices.shape[:2]:
        raise _shapes(probabilities, indices, mask, "[B, S, E], [B, S, k] and [B, S]")
    batch, length, experts = probabilities.shape
    if mask is not None and mask.shape != (batch, length):
        raise _shapes(probabilities, indices, mask, "[B, S, E], [B, S, k] and [B, S]")
    counted = _counted(indices.flatten(0, 1), None if mask is None else mask.flatten()).view(batch, -1)
    # Sequence b's experts are numbers b E to b E + E - 1: one count for all.
    first = torch.arange(batch, device=indices.device)[:, None] * experts
    keys = torch.where(counted < 0, -1, counted + first)
    counts = sorted_slots(keys, batch * experts)[1].view(batch, experts)
    valid = torch.full_like(counts[:, :1], length) if mask is None else (mask != 0).sum(1, keepdim=True)
    told = reduce_over(sequence_groups, torch.cat([counts, valid], 1))
    sequences = reduce_over(batch_groups, torch.full((), batch, dtype=torch.int64, device=indices.device))
    p = probabilities.to(wide(probabilities.dtype))
    summed = p.sum(1) if mask is None else torch.where((mask != 0)[:, :, None], p, 0.0).sum(1)
    tokens = told[:, -1:].clamp(min=1).to(p.dtype)
    shares = told[:, :-1].to(p.dtype) * (experts / indices.shape[2]) / tokens
    ranks = ranks_of([*batch_groups, *sequence_groups]) if data_ranks is None else data_ranks
    return (shares * summed / tokens).sum() / sequences.clamp(min=1) * ranks


def count_choices(indices: Tensor, experts: int, *, groups: Sequence[AxisGroup], mask: Tensor | None = None) -> Tensor:
    """int64 [E]: how many choices each expert got in the whole batch.

    Arguments:
        indices: integers [T, k], negative for none; mask: [T], nonzero for tokens that count.
        groups: every axis that splits tokens, and no other: where tp ranks hold the same tokens, not tp; where sequence
            parallelism splits them, tp too. One `all_reduce` of E integers for each.
    """
    return reduce_over(groups, sorted_slots(_counted(indices, mask), experts)[1])


def add_choices(total: Tensor, indices: Tensor, mask: Tensor | None = None) -> None:
    """Add this rank's choices to `total`, int64 [E], once for each forward: a forward that recomputes activations in backward
    adds nothing. Sum `total` over ranks once a step (`reduce_over`), before `step_bias`."""
    if not compat.in_backward():
        total += sorted_slots(_counted(indices, mask), total.shape[0])[1]


def step_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """DeepSeek-V3's rule, once a step: the bias of an expert with more choices than the mean falls by `rate`, with fewer it
    rises. It is not re-centred, as in the paper.

    Arguments:
        bias: floating [E], added to scores where experts are chosen only; counts: of the whole batch, equal on all ranks.
    """
    with torch.no_grad():
        # Compared as integers: a mean in float32 would misjudge counts beyond 2^24.
        bias += rate * torch.sign(counts.sum() - counts * counts.shape[0]).to(bias.dtype)


def collectives(
    loss: str, experts: int, groups: Sequence[AxisGroup], *, scope: str = "global", sequences: int = 0
) -> list[Call]:
    """What one call sends forward; backward sends nothing.

    Arguments:
        loss: load_balance, z, sequence or counts.
        groups: those of the call; for `sequence` its sequence_groups, with `sequences` on this rank (its batch_groups send one
            integer more each).
    """
    elements = {"load_balance": experts + 1, "z": 1, "sequence": sequences * (experts + 1), "counts": experts}[loss]
    if scope == "per_rank":
        return []
    return [Call("all_reduce", group.axis, elements, torch.int64) for group in groups if group.size > 1]


def _counted(indices: Tensor, mask: Tensor | None) -> Tensor:
    return indices if mask is None else torch.where((mask != 0)[:, None], indices, -1)


def _sums(probabilities: Tensor, indices: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """This rank's probabilities summed over tokens [E], and its counts with its number of tokens behind them [E + 1]."""
    p = probabilities.to(wide(probabilities.dtype))
    counts = sorted_slots(_counted(indices, mask), p.shape[1])[1]
    if mask is None:
        return p.sum(0), torch.cat([counts, torch.full_like(counts[:1], p.shape[0])])
    valid = mask != 0
    return torch.where(valid[:, None], p, 0.0).sum(0), torch.cat([counts, valid.sum()[None]])


def _check(p: Tensor, indices: Tensor | None, mask: Tensor | None, scope: str) -> None:
    if scope not in SCOPES:
        raise PlanError(f"a router's loss has no scope {scope!r}", code="bad-value", legal=list(SCOPES))
    rows = p.shape[0] if p.dim() == 2 else -1
    good = indices is None or (indices.dim() == 2 and indices.shape[0] == rows and indices.shape[1] > 0)
    if rows < 0 or not good or (mask is not None and mask.shape != (rows,)):
        raise _shapes(p, indices, mask, "[T, E], [T, k] and [T]")


def _shapes(p: Tensor, indices: Tensor | None, mask: Tensor | None, legal: str) -> PlanError:
    of = [list(x.shape) for x in (p, indices, mask) if x is not None]
    return PlanError(f"a router's loss got {', '.join(map(str, of))}", code="experts-shape", legal=legal)
