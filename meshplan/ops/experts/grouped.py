"""Experts on rows that are sorted by expert: matmuls with packed 3-D weights, and the MLP that most models make of them.

    rows    0 0 0 | 2 2     counts (3, 0, 2): rows of expert 0, none of expert 1, two of expert 2
    weight  [E, out, in] as in `nn.Linear`, or [E, in, out] with `turned`

One matmul an expert, whichever dtype: exact in float64. On CUDA the Triton kernels of `meshplan.kernels.experts` do all experts
in one launch, and the gated unit in it; where they cannot run (compiled code), torch's grouped matmul does in bfloat16. An
expert without rows has a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.derivative import require_first

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss' gated unit: (up + 1) gate sigmoid(alpha gate), gate at most `limit`, up within it."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def grouped_linear(
    x: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None = None, turned: bool = False
) -> Tensor:
    """Each row times the weight of its expert; under autocast in its dtype, as `F.linear`.

    Arguments:
        x: [N, in]; counts: rows of each expert, N in all.
        weight: [E, out, in], or [E, in, out] with `turned`; bias: [E, out].

    Returns:
        [N, out].

    Raises:
        PlanError: `experts-shape`.
    """
    _check(x.shape, counts, weight, bias, turned)
    x, weight, bias = _as_autocast(x), _as_autocast(weight), None if bias is None else _as_autocast(bias)
    if (kernels := fastest(x, weight, bias)) is not None:
        return kernels.grouped_linear(x, tuple(counts), weight, bias, turned)  # type: ignore[no-any-return]
    return _Grouped.apply(x, weight, bias, tuple(counts), turned)  # type: ignore[no-any-return]


def fastest(*tensors: Tensor | None) -> Any:
    """The Triton kernels, `meshplan.kernels.experts.grouped`, where they take what is at hand; None where torch's own operations
    do it: on CPU, in float64, in mixed dtypes, on tensors without data, and in compiled code."""
    there = [t for t in tensors if t is not None]
    if any(not t.is_cuda or t.dtype != there[0].dtype or t.dtype == torch.float64 for t in there):
        return None
    if torch.compiler.is_compiling() or any(compat.is_fake(t) for t in there):
        return None
    try:
        from meshplan.kernels.experts import grouped as kernels
    except ImportError:  # a CUDA build of torch brings Triton along; others may not
        return None
    return kernels


def grouped_mlp(
    x: Tensor,
    counts: Sequence[int],
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str | Callable[..., Tensor] = "silu",
    gated: bool = True,
    interleaved: bool = False,
    turned: bool = False,
) -> Tensor:
    """down(act(gate) * up) of each row's expert.

    Arguments:
        x: [N, H]; counts: rows of each expert.
        up: gate and up packed, [E, 2F, H] (turned: [E, H, 2F]); without `gated` only up, F for 2F.
        down: [E, H, F] (turned: [E, F, H]); up_bias, down_bias: [E, 2F] and [E, H].
        activation: a name of `ACTIVATIONS` or a function; with `gated`, a function takes gate and up, and makes all of the unit
            (`clamped_swiglu`).
        interleaved: gate and up alternate (g u g u, as in gpt-oss) rather than following each other (g g u u).
        turned: weights are [in, out].

    Returns:
        [N, H].

    Raises:
        PlanError: `experts-shape`, `bad-value` for an activation that is not known.
    """
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        raise PlanError(f"experts have no activation {activation!r}", code="bad-value", legal=list(ACTIVATIONS))
    if gated and (activation == "silu" or activation is clamped_swiglu):
        made = _fused_mlp(x, counts, (up, down, up_bias, down_bias), interleaved, activation is clamped_swiglu, turned)
        if made is not None:
            return made
    h = grouped_linear(x, counts, up, up_bias, turned)
    if not gated:
        h = (ACTIVATIONS[activation] if isinstance(activation, str) else activation)(h)
    else:
        gate, other = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)
        h = ACTIVATIONS[activation](gate) * other if isinstance(activation, str) else activation(gate, other)
    return grouped_linear(h, counts, down, down_bias, turned)


def _check(rows: Sequence[int], counts: Sequence[int], weight: Tensor, bias: Tensor | None, turned: bool) -> None:
    fan_in, fan_out = (weight.shape[1], weight.shape[2]) if turned else (weight.shape[2], weight.shape[1])
    good = len(rows) == 2 and list(rows) == [sum(counts), fan_in] and len(counts) == weight.shape[0]
    if not good or (bias is not None and list(bias.shape) != [weight.shape[0], fan_out]):
        raise PlanError(
            f"grouped experts got rows {list(rows)}, counts {list(counts)}, weights {list(weight.shape)}"
            + ("" if bias is None else f" and biases {list(bias.shape)}"),
            code="experts-shape",
            legal="rows [N, in] with N the sum of the counts, weights [E, out, in] (turned: [E, in, out]), biases [E, out]",
        )


def check_mlp(
    rows: Sequence[int],
    counts: Sequence[int],
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    turned: bool,
    square: bool = False,
) -> None:
    """Raises PlanError `experts-shape` if `grouped_mlp` of a gated unit cannot take rows of that shape, or, with `square`, would
    not return rows as wide."""
    _check(rows, counts, up, up_bias, turned)
    # Half of a width that is odd is no width.
    packed = up.shape[2 if turned else 1]
    _check((rows[0], packed // 2 if packed % 2 == 0 else -1), counts, down, down_bias, turned)
    width = down.shape[2 if turned else 1]
    if square and width != rows[1]:
        raise PlanError(
            f"experts make {width} numbers of {rows[1]}", code="experts-shape", legal="rows as wide as the tokens"
        )


def _fused_mlp(
    x: Tensor,
    counts: Sequence[int],
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    interleaved: bool,
    clamped: bool,
    turned: bool,
) -> Tensor | None:
    """`grouped_mlp` of a gated unit by the kernels, None where these do not run."""
    up, down, up_bias, down_bias = (None if t is None else _as_autocast(t) for t in weights)
    x = _as_autocast(x)
    if (kernels := fastest(x, up, down, up_bias, down_bias)) is None:
        return None
    assert up is not None and down is not None
    check_mlp(x.shape, counts, up, down, up_bias, down_bias, turned)
    experts = kernels.Packed(up, down, up_bias, down_bias, kernels.Pair(interleaved, clamped), turned)
    return kernels.grouped_mlp(x, tuple(counts), experts)  # type: ignore[no-any-return]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...], turned: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.turned = counts, turned
        return _rows_times(x, weight if turned else weight.transpose(1, 2), counts, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        require_first("experts")
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _rows_times(grad, weight.transpose(1, 2) if ctx.turned else weight, ctx.counts)
        if ctx.needs_input_grad[1]:
            dw = _sums(x, grad, ctx.counts) if ctx.turned else _sums(grad, x, ctx.counts)
        if ctx.needs_input_grad[2]:
            db = torch.stack([rows.sum(0) for rows in grad.split(list(ctx.counts))])
        return dx, dw, db, None, None


def _as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if x.dtype == torch.float64 or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _rows_times(x: Tensor, weight: Tensor, counts: tuple[int, ...], bias: Tensor | None = None) -> Tensor:
    """[N, a] by [E, a, b] -> [N, b]."""
    if _in_one_launch(x, weight):
        out = F.grouped_mm(x, weight, offs=_offsets(counts, x))
        if bias is not None:
            out = out + bias.repeat_interleave(torch.tensor(counts, device=x.device), 0, output_size=x.shape[0])
        return out
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for e, count in enumerate(counts):
        if count:
            rows, made = x[start : start + count], out[start : start + count]
            if bias is None:
                torch.mm(rows, weight[e], out=made)
            else:
                torch.addmm(bias[e], rows, weight[e], out=made)
            start += count
    return out


def _sums(left: Tensor, right: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[N, a] and [N, b] -> [E, a, b], the sum over each expert's rows of left times right; zeros without rows."""
    if _in_one_launch(left, right):
        out = F.grouped_mm(left.T, right, offs=_offsets(counts, left))
        # Nothing is written for an expert without rows.
        idle = [e for e, count in enumerate(counts) if not count]
        return out.index_fill(0, torch.tensor(idle, device=out.device), 0) if idle else out
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    start = 0
    for e, count in enumerate(counts):
        if count:
            torch.mm(left[start : start + count].T, right[start : start + count], out=out[e])
            start += count
        else:
            out[e].zero_()
    return out


def _in_one_launch(*operands: Tensor) -> bool:
    """Whether torch's grouped matmul takes these: bfloat16 on CUDA from compute capability 9, rows, and widths of 16 bytes."""
    if not hasattr(F, "grouped_mm") or any(
        not x.is_cuda or x.dtype != torch.bfloat16 or min(x.shape) == 0 for x in operands
    ):
        return False
    if any(size % 8 for x in operands for size in x.shape[-2 if x.dim() == 3 else -1 :]):
        return False
    return torch.cuda.get_device_capability(operands[0].device) >= (9, 0)


def _offsets(counts: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(like.device, non_blocking=True)
