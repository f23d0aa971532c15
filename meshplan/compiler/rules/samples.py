"""Rules of functions that treat each sample of a batch, or each of its channels, alone: pooling, resizing, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshplan.compiler.rules.base import REP, Op, Rule, Strategy
from meshplan.plan.placements import Shard


def each_channel(spatial: int) -> Rule:
    """Pooling over `spatial` dims: every dim before them (batch, channels) may be split, if no rank is left empty."""

    def rule(op: Op, n: int) -> list[Strategy]:
        x = op.ins[0]
        return [
            Strategy((Shard(d),), (Shard(d),) * len(op.outs)) for d in range(x.dim() - spatial) if filled(x.shape[d], n)
        ]

    return rule


def resized(op: Op, n: int) -> list[Strategy]:
    """F.interpolate: batch and channels."""
    return [Strategy((Shard(d),), (Shard(d),)) for d in (0, 1) if filled(op.ins[0].shape[d], n)]


def each_sample(op: Op, n: int) -> list[Strategy]:
    """The batch alone; whatever else the function is given (weight, bias) is replicated."""
    rest = (REP,) * (len(op.ins) - 1)
    return [Strategy((Shard(0), *rest), (Shard(0),) * len(op.outs))] if filled(op.ins[0].shape[0], n) else []


def batch_norm(op: Op, n: int) -> list[Strategy]:
    """F.batch_norm with running statistics. In training they are the batch's, of which a rank has but a part."""
    return [] if op.arg(5, "training", False) else each_sample(op, n)


def instance_norm(op: Op, n: int) -> list[Strategy]:
    """F.instance_norm without running statistics, which each rank would move by its own samples."""
    return each_sample(op, n) if op.arg(1, "running_mean") is None else []


def filled(size: int, n: int) -> bool:
    """Whether a dim of `size` cut in `n` leaves each rank something: not every kernel takes an empty batch."""
    return -(-size // n) * (n - 1) < size


_POOL = ("input", "kernel_size", "stride", "padding")
RULES: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((F.avg_pool1d, torch.max_pool1d, F.adaptive_avg_pool1d, F.lp_pool1d), each_channel(1)),
    **dict.fromkeys((F.avg_pool2d, torch.max_pool2d, F.adaptive_avg_pool2d, F.lp_pool2d), each_channel(2)),
    **dict.fromkeys((F.avg_pool3d, torch.max_pool3d, F.adaptive_avg_pool3d), each_channel(3)),
    F.interpolate: resized,
    **dict.fromkeys((F.group_norm, torch.group_norm, F.unfold, F.fold), each_sample),
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}
SIGNATURES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.avg_pool1d: (*_POOL, "ceil_mode", "count_include_pad"),
    F.avg_pool2d: (*_POOL, "ceil_mode", "count_include_pad", "divisor_override"),
    F.avg_pool3d: (*_POOL, "ceil_mode", "count_include_pad", "divisor_override"),
    **dict.fromkeys((torch.max_pool1d, torch.max_pool2d, torch.max_pool3d), (*_POOL, "dilation", "ceil_mode")),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), ("input", "output_size")),
    **dict.fromkeys((F.lp_pool1d, F.lp_pool2d), ("input", "norm_type", "kernel_size", "stride", "ceil_mode")),
    F.interpolate: (
        "input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias",
    ),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.group_norm: ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    F.unfold: ("input", "kernel_size", "dilation", "padding", "stride"),
    F.fold: ("input", "output_size", "kernel_size", "dilation", "padding", "stride"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.instance_norm: (
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
    ),
}  # fmt: skip
