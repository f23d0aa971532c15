"""Experts over the ranks of one node through each other's memory: rows written into their owners', answers read from them.

    forward    counts -> host; choices and rows pushed -> experts, on tiles as they arrive -> answers -> pulled and summed
    backward   gradients pushed -> the experts' backward -> answers -> pulled and summed, with those of weights

A token goes once to each rank that has one of its experts, which weighs and sums what they give, and one row a (token, rank)
comes home: the bytes of `alltoall` with `dedup`. Where the experts are an `Mlp` their first matmul reads the inbox through a
table, and begins on tiles whose rows have come while others are under way; any other `Body` gets its rows copied, each once it
has come. What backward needs is kept in memory of this rank's own, so that the windows serve the next layer.

Every function takes one entry for each rank that this process holds: one, or all of them (*logical ranks*).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.experts.call import Call
from meshplan.kernels.experts.deal import Tables, agree
from meshplan.kernels.experts.exchange import PROGRAMS
from meshplan.kernels.experts.gather import take, weigh
from meshplan.kernels.experts.grouped import DTYPES, Packed, mlp_backward, mlp_forward
from meshplan.kernels.experts.launch import Gather, Groups
from meshplan.kernels.experts.numbers import check_dtype, unit_stride
from meshplan.kernels.experts.window import Window
from meshplan.ops.derivative import require_first
from meshplan.ops.experts.contract import Body, apply_body
from meshplan.ops.experts.grouped import check_mlp, clamped_swiglu, grouped_mlp


class Mlp:
    """Experts as packed weights of a gated MLP: a `Body` that the fused dispatch looks into."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __call__(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        pair = self.packed.pair
        return grouped_mlp(
            x,
            counts,
            *self.packed.tensors,
            activation=clamped_swiglu if pair.clamped else "silu",
            interleaved=pair.interleaved,
            turned=self.packed.turned,
        )

    def direct(self, like: Tensor) -> bool:
        """Whether the kernels can take rows such as `like` straight from an inbox: autocast would have them converted first."""
        cast = torch.is_autocast_enabled(like.device.type)
        return (
            not cast and like.dtype in DTYPES and all(t is None or t.dtype == like.dtype for t in self.packed.tensors)
        )


def fused_experts(
    tokens: Sequence[Tensor],
    indices: Sequence[Tensor],
    weights: Sequence[Tensor],
    bodies: Sequence[Body],
    window: Window,
) -> list[Tensor]:
    """`routed_experts` for each rank that `window` holds, in rank order.

    Arguments:
        tokens: [T, H], any T up to the window's; indices: integers [T, k], negative for a choice that no expert takes; weights:
            [T, k]. bodies: each rank's experts.

    Returns:
        [T, H] in the dtype of the tokens. Sums are in float32 and rounded once on the experts' rank and once at home.

    Raises:
        PlanError: `experts-shape`, `experts-kernel`; `expert-index` and `experts-overflow` on all ranks together, before any
            row is sent.
    """
    k = _check(tokens, indices, weights, window)
    dtype = torch.float64 if tokens[0].dtype == torch.float64 else torch.float32
    heavy = [w.to(dtype).contiguous() for w in weights]
    chosen = [i.contiguous() for i in indices]
    deal, routed = agree(window, chosen, tokens[0].shape[1] * tokens[0].element_size())
    call = Call(window, deal, routed, chosen, tuple(Tables.of(deal, r, window.device) for r in window.held), k)
    held = len(window.held)
    packed = [body.packed for body in bodies if isinstance(body, Mlp) and body.direct(tokens[0])]
    if len(packed) == held:
        parameters = [t for p in packed for t in p.tensors]
        shapes = [(p.pair, p.turned) for p in packed]
        for rank, x, p in zip(window.held, tokens, packed, strict=True):
            check_mlp((sum(deal.experts(rank)), x.shape[1]), deal.experts(rank), *p.tensors, p.turned, square=True)
        made = _ArriveAtMlp.apply(call, shapes, *tokens, *heavy, *parameters)
        y = list(made[:held])
    else:
        made = _Arrive.apply(call, *tokens, *heavy)
        y = [apply_body(b, x, deal.experts(r)) for b, x, r in zip(bodies, made[:held], window.held, strict=True)]
    return list(_Home.apply(call, *y, *made[held:]))


class _Arrive(torch.autograd.Function):
    """Tokens and weights -> rows of each inbox's pairs, and its weights."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        held = len(call.window.held)
        tokens, weights = inputs[:held], inputs[held:]
        heavy = call.choose(weights)
        call.push(tokens)
        call.sent()
        x = [
            take(call.inbox(rank, tokens[at]), call.there[at].rows, call.flags(rank))
            for at, rank in enumerate(call.window.held)
        ]
        call.used()
        ctx.call, ctx.like = call, [torch.empty_like(t, device="meta") for t in tokens]
        return *x, *heavy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("experts")
        held = len(ctx.like)
        rows, numbers = ctx.call.answer(grads[:held], [None] * held, [unit_stride(g) for g in grads[held:]], ctx.like)
        return None, *rows, *numbers


class _ArriveAtMlp(torch.autograd.Function):
    """Tokens, weights and packed experts -> what the experts make of each inbox's pairs, and its weights."""

    @staticmethod
    def forward(ctx: Any, call: Call, shapes: list[tuple[Any, bool]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        held = len(call.window.held)
        tokens: Any = inputs[:held]
        weights: Any = inputs[held : 2 * held]
        parameters = inputs[2 * held :]
        heavy = call.choose(weights)
        call.push(tokens)
        keep = any(ctx.needs_input_grad)
        made, saved, ctx.groups = [], [], []
        for at, rank in enumerate(call.window.held):
            packed = _packed(parameters, shapes, at)
            groups = Groups(call.deal.experts(rank), call.window.device)
            inbox, flags = call.inbox(rank, tokens[at]), call.flags(rank)
            gather = Gather(call.there[at].rows, flags.flags, flags.chunk, flags.epoch, PROGRAMS)
            y, h = mlp_forward(inbox, packed, groups, keep, gather)
            made.append(y)
            ctx.groups.append(groups)
            # The inbox serves the next exchange: what backward reads again is kept.
            saved += [inbox.clone() if keep else None, h]
        call.sent()
        call.used()
        ctx.call, ctx.shapes, ctx.like = call, shapes, [torch.empty_like(t, device="meta") for t in tokens]
        ctx.save_for_backward(*saved, *parameters)
        return *made, *heavy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("experts")
        call, held = ctx.call, len(ctx.like)
        kept = ctx.saved_tensors  # read once: a recomputed one is given once
        saved, parameters = kept[: 2 * held], kept[2 * held :]
        wanted, found, dx = ctx.needs_input_grad[2 + 2 * held :], [], []
        for at in range(held):
            packed = _packed(parameters, ctx.shapes, at)
            x = take(saved[2 * at], call.there[at].rows)
            made = mlp_backward(
                grads[at], x, saved[2 * at + 1], packed, ctx.groups[at], (True, *wanted[4 * at : 4 * at + 4])
            )
            dx.append(made.x)
            found += made[1:]
        rows, numbers = call.answer(dx, [None] * held, [unit_stride(g) for g in grads[held:]], ctx.like)
        return None, None, *rows, *numbers, *found


class _Home(torch.autograd.Function):
    """What experts made of pairs, and the weights -> the tokens' results."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        held = len(call.window.held)
        y, heavy = inputs[:held], inputs[held:]
        like = [
            torch.empty(i.shape[0], x.shape[1], dtype=x.dtype, device="meta")
            for i, x in zip(call.indices, y, strict=True)
        ]
        out, _ = call.answer(y, heavy, [None] * held, like)
        ctx.call = call
        ctx.save_for_backward(*y, *heavy)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("experts")
        call, held = ctx.call, len(grads)
        kept = ctx.saved_tensors  # read once: a recomputed one is given once
        y, heavy = kept[:held], kept[held:]
        call.window.pushed += 1
        call.push(grads)
        call.sent()
        found = [
            weigh(y[at], heavy[at], call.there[at].place, call.inbox(rank, grads[at]), call.flags(rank))
            for at, rank in enumerate(call.window.held)
        ]
        call.used()
        return None, *(dy for dy, _ in found), *(dw for _, dw in found)


def _packed(parameters: Sequence[Tensor | None], shapes: list[tuple[Any, bool]], at: int) -> Packed:
    up, down, up_bias, down_bias = parameters[4 * at : 4 * at + 4]
    assert up is not None and down is not None
    return Packed(up, down, up_bias, down_bias, *shapes[at])


def _check(tokens: Sequence[Tensor], indices: Sequence[Tensor], weights: Sequence[Tensor], window: Window) -> int:
    """Returns k."""
    k = indices[0].shape[-1]
    for x, i, w in zip(tokens, indices, weights, strict=True):
        shaped = x.dim() == 2 and i.dim() == 2 and i.shape == w.shape and i.shape == (x.shape[0], k) and k > 0
        if not shaped or i.dtype not in (torch.int64, torch.int32):
            raise PlanError(
                f"fused experts got tokens {list(x.shape)}, indices {list(i.shape)} ({i.dtype}) and weights {list(w.shape)}",
                code="experts-shape",
                legal="tokens [T, H], integer indices [T, k] and weights [T, k], k at least 1",
            )
        check_dtype(x.dtype, known=(tokens[0].dtype,))
    check_dtype(tokens[0].dtype)
    if tokens[0].dtype == torch.float64 and window.sizes.weight_bytes < 8:
        raise PlanError(
            "fused experts got float64 tokens, and a window whose weights are float32",
            code="experts-kernel",
            legal="weight_bytes=8",
        )
    return k
