"""Grouped experts in Triton: rows that are sorted by expert times packed weights, and the gated MLP, with their gradients.

Results are those of `meshplan.ops.experts.grouped`, which hands CUDA tensors of 16 and 32 bits to these. What the MLP keeps for
backward is its input and gate and up, [N, H] and [N, 2F]; the unit's value is made again where its gradient is.

    forward    gate, up, unit = x up^T              y = unit down^T
    backward   d gate, d up, unit = dy down, gate, up     d down = dy^T unit    dx = d(gate, up) up    d up = d(gate, up)^T x
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshplan.kernels.experts.launch import Gather, Groups, Pair, columns_launch, rows_launch, sums_launch
from meshplan.kernels.experts.matmul import UNIT, UNIT_GRADIENTS
from meshplan.kernels.experts.numbers import check_dtype, machine_of, unit_stride
from meshplan.ops.derivative import require_first

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Packed(NamedTuple):
    """The weights of an MLP's experts, as `grouped_mlp` takes them; `pair` and `turned` say how they lie."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    pair: Pair = Pair()
    turned: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self[:4]

    @property
    def width(self) -> int:
        """F, of the unit."""
        return self.down.shape[1 if self.turned else 2]


class MlpGradients(NamedTuple):
    x: Tensor | None
    up: Tensor | None
    down: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def grouped_linear(
    x: Tensor, counts: tuple[int, ...], weight: Tensor, bias: Tensor | None = None, turned: bool = False
) -> Tensor:
    """`ops.experts.grouped.grouped_linear`: [N, in] -> [N, out].

    Raises:
        PlanError: `experts-kernel` for tensors that the kernels do not take.
    """
    _check(x, weight, bias)
    return _Linear.apply(x, weight, bias, Groups(tuple(counts), x.device), turned)  # type: ignore[no-any-return]


def grouped_mlp(x: Tensor, counts: tuple[int, ...], experts: Packed) -> Tensor:
    """`ops.experts.grouped.grouped_mlp` of a gated unit: [N, H] -> [N, H].

    Raises:
        PlanError: `experts-kernel` for tensors that the kernels do not take.
    """
    _check(x, *experts.tensors)
    groups = Groups(tuple(counts), x.device)
    return _Mlp.apply(x, *experts.tensors, groups, experts.pair, experts.turned)  # type: ignore[no-any-return]


def times(
    x: Tensor, weight: Tensor, turned: bool, groups: Groups, bias: Tensor | None = None, half: bool = False, **more: Any
) -> Tensor:
    """Rows times their experts' weights, [N, out], `half` of it if a unit is made; `more` as in `rows_launch`."""
    x = unit_stride(x)
    width = weight.shape[2 if turned else 1]
    out = x.new_empty(sum(groups.counts), width // 2 if half else width)
    rows_launch(x, weight, turned, groups, out, machine_of(x.device), bias=_packed(bias), **more).run()
    return out


def sums(a: Tensor, b: Tensor, groups: Groups, like: Tensor) -> Tensor:
    """The sum of a^T b over each expert's rows, as contiguous as it can be, in the dtype of `like`."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    sums_launch(unit_stride(a), unit_stride(b), groups, out, machine_of(a.device)).run()
    return out


def column_sums(x: Tensor, groups: Groups, like: Tensor) -> Tensor:
    """The sum over each expert's rows."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    columns_launch(unit_stride(x), groups, out, machine_of(x.device)).run()
    return out


def mlp_forward(
    x: Tensor, experts: Packed, groups: Groups, keep: bool, gather: Gather | None = None
) -> tuple[Tensor, Tensor | None]:
    """y [N, H], and gate and up [N, 2F] if they are to be kept. With `gather` x are rows that it reads."""
    rows = sum(groups.counts)
    h = x.new_empty(rows, 2 * experts.width) if keep else None
    unit = times(
        x, experts.up, experts.turned, groups, experts.up_bias, half=True, do=UNIT.value,
        pair=experts.pair, h=h, gather=gather,
    )  # fmt: skip
    return times(unit, experts.down, experts.turned, groups, experts.down_bias), h


def mlp_backward(
    dy: Tensor, x: Tensor, h: Tensor, experts: Packed, groups: Groups, wanted: tuple[bool, ...]
) -> MlpGradients:
    """The gradients that are wanted, from that of y; x are the rows themselves."""
    turned, dh = experts.turned, torch.empty_like(h)
    unit = times(dy, experts.down, not turned, groups, do=UNIT_GRADIENTS.value, pair=experts.pair, h=h, dh=dh)

    def weights(grad: Tensor, rows: Tensor, like: Tensor) -> Tensor:
        return sums(rows, grad, groups, like) if turned else sums(grad, rows, groups, like)

    return MlpGradients(
        times(dh, experts.up, not turned, groups) if wanted[0] else None,
        weights(dh, x, experts.up) if wanted[1] else None,
        weights(dy, unit, experts.down) if wanted[2] else None,
        column_sums(dh, groups, experts.up_bias) if wanted[3] and experts.up_bias is not None else None,
        column_sums(dy, groups, experts.down_bias) if wanted[4] and experts.down_bias is not None else None,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, turned: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.groups, ctx.turned = groups, turned
        return times(x, weight, turned, groups, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first("experts")
        x, weight, bias = ctx.saved_tensors
        groups, turned, wanted = ctx.groups, ctx.turned, ctx.needs_input_grad
        dx = times(grad, weight, not turned, groups) if wanted[0] else None
        left, right = (x, grad) if turned else (grad, x)
        dw = sums(left, right, groups, weight) if wanted[1] else None
        return dx, dw, column_sums(grad, groups, bias) if wanted[2] else None, None, None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        groups: Groups,
        pair: Pair,
        turned: bool,
    ) -> Tensor:
        experts = Packed(up, down, up_bias, down_bias, pair, turned)
        y, h = mlp_forward(x, experts, groups, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, h, *experts.tensors)
        ctx.groups, ctx.pair, ctx.turned = groups, pair, turned
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        require_first("experts")
        x, h, *tensors = ctx.saved_tensors
        experts = Packed(*tensors, ctx.pair, ctx.turned)
        return *mlp_backward(grad, x, h, experts, ctx.groups, ctx.needs_input_grad), None, None, None


def _check(x: Tensor, *others: Tensor | None) -> None:
    machine_of(x.device)
    check_dtype(x.dtype, known=DTYPES)
    check_dtype(*(t.dtype for t in others if t is not None), known=(x.dtype,))


def _packed(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
