"""Attention of a packed batch whose samples lie on groups of ranks of their own sizes: a ring for each sample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.build import Groups
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.attention import block as plain
from meshplan.ops.attention.mask import Mask, exactly
from meshplan.ops.attention.ring import Kept, Ring, attend, attend_backward
from meshplan.ops.attention.schedule import Piece, Schedule, degrees
from meshplan.ops.derivative import require_first
from meshplan.ops.precision import wide
from meshplan.runtime.comm import AxisGroup


def split_for_samples(spec: MeshSpec, axis: str = "cp") -> tuple[MeshSpec, list[tuple[str, ...]]]:
    """`spec` with `axis` cut into sub-axes, so that every degree has its groups of neighbours, and the sets of axes to build:
    for cp 8, cp_8 x cp_4 x cp_2, each of 2, with the groups of 4 over (cp_4, cp_2)."""
    steps = degrees(spec.degree(axis))
    parts = {f"{axis}_{high}": high // low for low, high in itertools.pairwise(steps)}
    if not parts:
        return spec, [(axis,)]
    names = list(parts)
    return spec.split_axis(axis, dict(reversed(parts.items()))), [
        tuple(reversed(names[:k])) for k in range(2, len(names) + 1)
    ]


def groups_for_samples(groups: Groups, axis: str = "cp") -> dict[int, AxisGroup]:
    """The groups of neighbours this rank is in, by their size, of a mesh that `split_for_samples` cut. Ranks of the axis number
    degree x block to degree x block + degree - 1 form a group."""
    steps = degrees(groups.spec.degree(axis))
    names = [f"{axis}_{high}" for high in steps[1:]]
    return {1: AxisGroup(axis, 1, 0)} | {high: groups.group(*names[: k + 1]) for k, high in enumerate(steps[1:])}


def run_dynamic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    groups: Mapping[int, AxisGroup],
    wave: int = 0,
    scale: float | None = None,
    block: Any = None,
) -> Tensor:
    """Attention of each sample to itself alone, as `schedule.work` lets positions see each other.

    The samples of a wave are computed one after another, those on more ranks first, each as a ring over its own group of
    neighbours (`groups`): the ranks of a group have the same samples before it, so all of them make the same exchanges in the
    same order. A sample on one rank exchanges nothing. Rows of padding give zero, and zero gradients.

    Arguments:
        q: [B, H, T, D]; k, v: [B, Hkv, T, D] and [B, Hkv, T, Dv]: this rank's packed rows of the wave (`Schedule.cut`), H a
            multiple of Hkv.
        groups: by size, as `groups_for_samples`.

    Returns:
        [B, H, T, Dv] in the dtype of `q`.

    Raises PlanError `context-shape` unless the rows are those of the schedule.
    """
    whole = groups[schedule.ranks]
    rows = schedule.rows(whole.rank, wave)
    if {x.shape[2] for x in (q, k, v)} != {rows}:
        raise PlanError(
            f"rank {whole.rank} got {q.shape[2]} rows of queries, {k.shape[2]} of keys and {v.shape[2]} of values in wave {wave}",
            code="context-shape",
            legal=f"the {rows} rows of its schedule",
        )
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _Dynamic.apply(q, k, v, schedule, dict(groups), wave, factor, plain if block is None else block)


class _Dynamic(torch.autograd.Function):
    """All samples in one node: left to the engine, ranks might come to their backwards in different orders."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        schedule: Schedule,
        groups: dict[int, AxisGroup],
        wave: int,
        scale: float,
        block: Any,
    ) -> Tensor:
        held = schedule.held(groups[schedule.ranks].rank, wave)
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        lse = q.new_zeros(q.shape[:3], dtype=wide(q.dtype))
        messages = []
        with exactly(q.device):
            for piece, at in _places(held):
                kept = attend(at(q), at(k), at(v), _mask(piece, schedule, q), _ring(piece, groups, scale, block))
                at(out).copy_(kept.out)
                at(lse).copy_(kept.lse)
                messages.append(kept.message)
        ctx.save_for_backward(q, out, lse, *messages)
        ctx.told = (held, schedule, groups, scale, block, k.shape, v.shape)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("attention")
        q, out, lse, *messages = ctx.saved_tensors
        held, schedule, groups, scale, block, k_shape, v_shape = ctx.told
        dq, dk, dv = (q.new_zeros(shape) for shape in (q.shape, k_shape, v_shape))
        with exactly(q.device):
            for (piece, at), message in zip(_places(held), messages, strict=True):
                kept = Kept(at(q), message, at(out), at(lse))
                shapes = at(dk).shape, at(dv).shape
                mask, ring = _mask(piece, schedule, q), _ring(piece, groups, scale, block)
                found = attend_backward(kept, at(grads[0]), shapes, mask, ring, False)
                for into, grad in zip((dq, dk, dv), found, strict=False):
                    at(into).copy_(grad)
        return dq, dk, dv, None, None, None, None, None


def _places(held: list[Piece]) -> Iterator[tuple[Piece, Any]]:
    """Each piece with what takes its rows out of a packed tensor."""
    start = 0
    for piece in held:
        yield piece, lambda x, start=start, rows=piece.rows: x.narrow(2, start, rows)
        start += piece.rows


def _mask(piece: Piece, schedule: Schedule, q: Tensor) -> Mask:
    work, docs = schedule.work, None
    if piece.sequence.size > piece.length:
        positions = torch.arange(piece.sequence.size, device=q.device)
        docs = (positions >= piece.length).to(torch.int32).neg().expand(q.shape[0], -1)
    return Mask(work.left, 0 if work.causal else None, docs)


def _ring(piece: Piece, groups: Mapping[int, AxisGroup], scale: float, block: Any) -> Ring:
    return Ring(block, scale, piece.sequence, groups[piece.degree])
