"""Clipping by the norm of all gradients, each logical element counted once, whatever mesh and layout it lives on.

Local norms are taken in a few fused kernels and their powers added up by the set of groups over which the parameters
are split. Then each distinct group makes one `all_reduce` of a short vector, and a pipeline one more of one element:

    sums of squares        rank 0   rank 1         after all_reduce on tp
    replicated                4        4      ->      4        4
    split on tp               3        5      ->      8        8        norm^2 = 12 on both ranks
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.ownership import Ownership, ownerships


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of the single-device gradients: same norm, same factor, on every rank.

    Parameters may be DTensors on different meshes and sub-meshes (sharded, unevenly or emptily, replicated, or with a
    gradient that is a partial sum) and plain tensors, of which every rank holds a copy unless
    `meshplan.runtime.ownership.declare` said otherwise. Ranks of a group must pass the same parameters in the same
    order; a parameter passed twice counts once; one without a gradient counts nothing, but keeps its place in the
    collectives: gradients may be missing on some ranks only (but not partial ones).

    Arguments:
        parameters: one tensor or an iterable, which is read once.
        max_norm: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`, in place.
        norm_type: a positive order, or inf.
        error_if_nonfinite: raise on a norm that is nan or inf. Waits for the device.
        foreach: False takes norms tensor by tensor; True and None in fused kernels.

    Returns:
        The norm before clipping: a plain 0-dim tensor, float32 or (if any gradient is) float64, equal on all ranks and
        bitwise equal where the gradients are. Half-precision gradients are accumulated in float32; the sum over
        parameters and ranks is in float64.

    Raises:
        PlanError: `norm-type`, `sparse-gradient`, and what `ownerships` raises.
        RuntimeError: for a non-finite norm if asked; on all ranks alike, before any gradient is changed.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise PlanError(f"gradients cannot be clipped by norm {norm_type}", code="norm-type", legal="above 0, or inf")
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list({id(p): p for p in given}.values())
    owners = ownerships(unique)
    held = [(_local(p.grad), owner) for p, owner in zip(unique, owners, strict=True) if p.grad is not None]
    for grad, _ in held:
        if grad.layout != torch.strided:
            raise PlanError(f"a gradient is {grad.layout}", code="sparse-gradient", legal="dense gradients")

    powers = _local_powers(held, owners, norm_type, foreach)
    total = _global_norm(powers, owners, norm_type)
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad, _ in held) else torch.float32
    total = total.to(held[0][0].device if held else total.device, wide)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    # Always multiplied, as torch does: a test for "below the limit" would wait for the device.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for (device, _), grads in _by_kind([grad for grad, _ in held]).items():
        compat.foreach_scale_(grads, factor.to(device))
    return total


def _local_powers(
    held: Sequence[tuple[Tensor, Ownership]], owners: Sequence[Ownership], order: float, foreach: bool | None
) -> dict[tuple[AxisGroup, ...], Tensor]:
    """This rank's sum of |g|^order (for inf: the maximum), by the groups over which it must still be reduced.

    Buckets come from the parameters, not from the gradients, so all ranks of a group have the same ones.
    """
    norms: dict[tuple[AxisGroup, ...], list[Tensor]] = {owner.split: [] for owner in owners}
    device = _reduction_device(held, owners)
    counted = [(grad, owner) for grad, owner in _summed(held) if owner.counted and grad.numel()]
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Ownership]]] = defaultdict(list)
    for grad, owner in counted:
        by_kind[grad.device, grad.dtype].append((grad, owner))
    for (_, dtype), items in by_kind.items():
        grads, wide = [grad for grad, _ in items], torch.promote_types(dtype, torch.float32)
        if foreach is False:
            local = [torch.linalg.vector_norm(grad, order, dtype=wide) for grad in grads]
        else:
            local = compat.foreach_norm(grads, order, wide)
        for norm, (_, owner) in zip(local, items, strict=True):
            norms[owner.split].append(norm)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    powers = {}
    for split, parts in norms.items():
        if not parts:
            powers[split] = zero
            continue
        # float64: squares of float32 norms above 1.8e19 would overflow, and shards should not show in the last digit.
        values = torch.stack([part.to(device) for part in parts]).double()
        powers[split] = values.max() if math.isinf(order) else values.pow(order).sum()
    return powers


def _global_norm(powers: dict[tuple[AxisGroup, ...], Tensor], owners: Sequence[Ownership], order: float) -> Tensor:
    op = "max" if math.isinf(order) else "sum"
    values = list(powers.values())
    # In order of first appearance, which is the same on all ranks; names of process groups need not be.
    for group in dict.fromkeys(group for split in powers for group in split):
        at = [i for i, split in enumerate(powers) if group in split]
        reduced = group.all_reduce(torch.stack([values[i] for i in at]), op)
        for i, value in zip(at, reduced.unbind(), strict=True):
            values[i] = value
    if not values:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack(values)
    total = stacked.max() if op == "max" else stacked.sum()
    stages = next((owner.stages for owner in owners if owner.stages is not None), None)
    if stages is not None:
        total = stages.all_reduce(total, op)
    return total if op == "max" else total.pow(1.0 / order)


def _summed(held: Sequence[tuple[Tensor, Ownership]]) -> list[tuple[Tensor, Ownership]]:
    """The gradients with partial ones replaced by their sums, in one flat `all_reduce` a group and dtype: the norm of
    a sum is not the sum of norms. The partial gradients themselves are left as they are: scaling commutes with it."""
    out = list(held)
    flat: dict[tuple[tuple[AxisGroup, ...], torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, (grad, owner) in enumerate(held):
        if owner.partial:
            flat[owner.partial, grad.device, grad.dtype].append(i)
    for (groups, _, _), at in flat.items():
        joined = torch.cat([held[i][0].reshape(-1) for i in at])
        for group in groups:
            joined = group.all_reduce(joined)
        for i, part in zip(at, joined.split([held[i][0].numel() for i in at]), strict=True):
            out[i] = (part, held[i][1])
    return out


def _local(grad: Tensor) -> Tensor:
    # Without grad mode this is the shard itself, no copy, so scaling it scales the gradient.
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _by_kind(grads: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        kinds[grad.device, grad.dtype].append(grad)
    return kinds


def _reduction_device(held: Sequence[tuple[Tensor, Ownership]], owners: Sequence[Ownership]) -> torch.device:
    """Where the groups can communicate: gradients may be offloaded to a CPU that has no communicator."""
    kind = next((owner.device_type for owner in owners if owner.device_type is not None), None)
    first = held[0][0].device if held else torch.device("cpu")
    return first if kind is None or kind == first.type else torch.device(kind)
