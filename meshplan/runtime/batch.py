"""Cutting a global batch into this rank's part, and means over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.context import in_order
from meshplan.errors import PlanError
from meshplan.mesh.build import expand
from meshplan.ops.token_mean import token_mean as _token_mean
from meshplan.plan.placements import Shard
from meshplan.plan.sections import sequence_pieces
from meshplan.runtime import boundary
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.session import Session, session_of


def shard_batch(
    model: nn.Module, batch: Mapping[str, Any], *, shift: Mapping[str, str] | None = None, ignore_index: int = -100
) -> dict[str, Any]:
    """This rank's part of a global batch, cut as the plan places each input, in the order in which cp deals sequences.

    Arguments:
        batch: any subset of the model's declared inputs by name, global; values may be tensors or nested containers of
            tensors. What is not a tensor passes through.
        shift: for models that take their labels shifted, `{"labels": "shift_labels"}`: the second is made of the first, each
            position's being the next one's along the last dim and `ignore_index` at the end, before anything is cut.

    Raises PlanError: `no-such-input` for a name the plan does not place, `batch-not-divisible`.
    """
    session = session_of(model)
    out = {}
    whole = dict(batch)
    for source, made in (shift or {}).items():
        if not isinstance(batch.get(source), Tensor):
            tensors = [name for name, x in batch.items() if isinstance(x, Tensor)]
            raise PlanError(f"the batch has no tensor {source!r} to shift", code="no-such-input", legal=tensors)
        whole[made] = torch.nn.functional.pad(batch[source][..., 1:], (0, 1), value=ignore_index)
    for name, value in whole.items():
        leaves, structure = compat.flatten(value)
        keys = [path for path, _ in compat.flatten_with_path(value)]
        out[name] = compat.unflatten(
            [
                _cut(session, f"{name}.{k}" if k else name, x) if isinstance(x, Tensor) else x
                for k, x in zip(keys, leaves, strict=True)
            ],
            structure,
        )
    return out


def _cut(session: Session, key: str, x: Tensor) -> Tensor:
    inputs, context = session.core.bound.inputs, session.core.bound.plan.context
    item = inputs.get(key) or inputs.get(key.partition(".")[0])
    if item is None:
        if key in dict(session.core.program.signature) or key.partition(".")[0] in dict(session.core.program.signature):
            return x
        raise PlanError(f"the plan does not place an input {key!r}", code="no-such-input", legal=list(inputs))
    for axis, placement in item.place.items():
        if not isinstance(placement, Shard):
            continue
        for one in [a for a in expand((axis,)) if session.core.spec.degree(a) > 1]:
            group = session.groups.group(one)
            dim = placement.dim % x.dim()
            pieces = sequence_pieces(one, group.size, context)
            if x.shape[dim] % pieces:
                raise PlanError(
                    f"dim {dim} of {key!r} has size {x.shape[dim]}, not divided by {one} {pieces}",
                    code="batch-not-divisible", legal=f"a multiple of {pieces}",
                )  # fmt: skip
            shard = in_order(Shard(dim, placement.parts), one, x.shape[dim], context)
            x = boundary.move(x, "N", "S", group, dim, x.shape[dim], shard.parts)
    return x.contiguous()


def data_group(session: Session) -> AxisGroup:
    """All ranks over which gradients are averaged, as one group."""
    return session.groups.group("dp_replicate", "dp_shard", "cp")


_latest: list[Session] = []


def token_mean(
    loss_per_token: Tensor,
    mask: Tensor | None = None,
    n_tokens: int | Tensor | None = None,
    *,
    model: nn.Module | None = None,
) -> Tensor:
    """The mean over the valid tokens of all data ranks, for losses computed outside the model.

    Each rank gets `local sum x data ranks / global count`: the mean of it over data ranks, and of its gradients, is the
    single-device value, with unequal counts too.

    Arguments:
        loss_per_token: this rank's losses, any shape.
        mask: valid tokens, broadcast to the losses; None for all.
        n_tokens: the global count where it is not this call's (accumulation: over all microbatches).
        model: whose data ranks are meant; default the model that `parallelize` returned last.
    """
    if model is not None:
        session = session_of(model)
    elif _latest:
        session = _latest[-1]
    else:
        raise PlanError("token_mean needs the ranks of a parallelised model", code="not-parallelized", legal="model=")
    group = data_group(session)
    return _token_mean(loss_per_token, mask, n_tokens, groups=[group] if group.size > 1 else [])


def remember(session: Session) -> None:
    """Make `session` the one that helpers without a model argument mean."""
    _latest[:] = [session]


def forget() -> None:
    """Drop the session that was made last."""
    _latest.clear()


def lowered(model: nn.Module) -> Any:
    """The `Lowered` of a model that `parallelize` returned. Raises PlanError `not-parallelized`."""
    return session_of(model).lowered
