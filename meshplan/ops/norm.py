"""RMS norm and layer norm over a dim that is split across ranks: local sums, all-reduced, forward and backward.

With N the global number of normalized elements, r = (mean(x^2) + eps)^(-1/2), h = (x - mean) r, and g = dy w:

    rms_norm    y = x r w      dx = r (g - x r^2 sum(g x) / N)              1 all_reduce of rows forward, 1 backward
    layer_norm  y = h w + b    dx = r (g - sum(g) / N - h sum(g h) / N)     2 of rows forward, 1 of 2 x rows backward

Sums run over all ranks of the group; a row is one normalization. dw and db are sums over this rank's rows of its own
elements: nothing to reduce on this axis. Layer norm takes mean and variance in two passes: in one, with sums of x and
x^2, the difference of two large numbers would cost what double precision gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.ops.calls import Call, all_reduces
from meshplan.ops.derivative import require_first
from meshplan.ops.precision import autocast_to_float32, wide
from meshplan.runtime.comm import AxisGroup, chunk_sizes


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    group: AxisGroup,
    dim: int = -1,
) -> Tensor:
    """`torch.nn.functional.rms_norm` of this rank's shard of a normalized dim.

    float16 and bfloat16 are computed in float32 and rounded once, as in torch; under CUDA autocast so are they, and the
    result is float32.

    Arguments:
        x: `[..., *normalized local]`: one of the last `len(normalized_shape)` dims is this rank's shard, in
            `chunk_sizes` order, uneven and empty shards included.
        normalized_shape: global sizes of the normalized dims.
        weight: this rank's shard, of the local normalized shape.
        eps: default: machine epsilon of the dtype computed in (that of float32 for half precision, as torch).
        group: the ranks over which `dim` is split.
        dim: which of the normalized dims is split, negative, counted from the end.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        PlanError: `norm-shape` if `x` or `weight` is not this rank's shard of `normalized_shape`.
    """
    _check("rms_norm", x, normalized_shape, group, dim, weight)
    x = autocast_to_float32(x, on_cpu=False)
    if eps is None:
        eps = torch.finfo(wide(x.dtype)).eps
    return _RmsNorm.apply(x, weight, group, len(normalized_shape), math.prod(normalized_shape), eps)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    group: AxisGroup,
    dim: int = -1,
) -> Tensor:
    """`torch.nn.functional.layer_norm` of this rank's shard of a normalized dim.

    Arguments, result and errors as in `rms_norm`; `bias` is this rank's shard too.
    """
    _check("layer_norm", x, normalized_shape, group, dim, weight, bias)
    x = autocast_to_float32(x, on_cpu=False)
    return _LayerNorm.apply(x, weight, bias, group, len(normalized_shape), math.prod(normalized_shape), eps)


def collectives(kind: str, rows: int, *, group: AxisGroup, phase: str = "forward") -> list[Call]:
    """What one call communicates in `phase` ("forward" or "backward"), in order.

    Arguments:
        kind: "rms_norm" or "layer_norm".
        rows: number of normalizations: elements of the leading dims of `x`.
    """
    if phase == "backward":
        return all_reduces([group], rows if kind == "rms_norm" else 2 * rows)
    return all_reduces([group], rows) * (1 if kind == "rms_norm" else 2)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, group: AxisGroup, dims: int, n: int, eps: float) -> Tensor:
        x_wide = x.to(wide(x.dtype))
        over = tuple(range(-dims, 0))
        square = group.all_reduce(x_wide.square().sum(over, keepdim=True))
        scale = torch.rsqrt(square / n + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.group, ctx.dims, ctx.n = group, dims, n
        out = x_wide * scale
        return (out if weight is None else out * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first("rms_norm")
        x, weight, scale = ctx.saved_tensors
        over = tuple(range(-ctx.dims, 0))
        grad = grad.to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        inner = grad if weight is None else grad * weight
        along = ctx.group.all_reduce((inner * normed).sum(over, keepdim=True))
        dx = (inner - normed * (along / ctx.n)).mul_(scale)
        return dx.to(x.dtype), _over_rows(grad * normed, weight), None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        group: AxisGroup,
        dims: int,
        n: int,
        eps: float,
    ) -> Tensor:
        x_wide = x.to(wide(x.dtype))
        over = tuple(range(-dims, 0))
        mean = group.all_reduce(x_wide.sum(over, keepdim=True)) / n
        centred = x_wide - mean
        square = group.all_reduce(centred.square().sum(over, keepdim=True))
        scale = torch.rsqrt(square / n + eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.group, ctx.dims, ctx.n = group, dims, n
        out = centred.mul_(scale)
        if weight is not None:
            out = out * weight
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first("layer_norm")
        x, weight, bias, mean, scale = ctx.saved_tensors
        over = tuple(range(-ctx.dims, 0))
        grad = grad.to(scale.dtype)
        normed = (x.to(scale.dtype) - mean).mul_(scale)
        inner = grad if weight is None else grad * weight
        sums = torch.stack([inner.sum(over, keepdim=True), (inner * normed).sum(over, keepdim=True)])
        level, along = (ctx.group.all_reduce(sums) / ctx.n).unbind(0)
        dx = (inner - level).sub_(normed * along).mul_(scale)
        return dx.to(x.dtype), _over_rows(grad * normed, weight), _over_rows(grad, bias), None, None, None, None


def _over_rows(grad: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The gradient of a local weight or bias: summed over the leading dims, in the parameter's dtype."""
    if parameter is None:
        return None
    rows = tuple(range(grad.dim() - parameter.dim()))
    return (grad.sum(rows) if rows else grad).to(parameter.dtype)


def _check(
    name: str, x: Tensor, normalized_shape: Sequence[int], group: AxisGroup, dim: int, *parameters: Tensor | None
) -> None:
    local = list(normalized_shape)
    if not -len(local) <= dim < 0:
        raise PlanError(
            f"{name} over {local} cannot be split on dim {dim}",
            code="norm-shape",
            legal=f"a dim from {-len(local)} to -1",
        )
    local[dim] = chunk_sizes(local[dim], group.size)[group.rank]
    shapes = [list(x.shape[x.dim() - len(local) :])] + [list(p.shape) for p in parameters if p is not None]
    if any(shape != local for shape in shapes):
        raise PlanError(
            f"{name} over {list(normalized_shape)} got shapes {shapes} of input and parameters; rank {group.rank} of "
            f"{group.size} on {group.axis} holds {local}",
            code="norm-shape",
            legal=f"input and parameters laid out S({dim}) on {group.axis}",
        )
