"""Elementwise aten ops: sharded dims pass through with broadcasting; partial sums pass only where the op is linear."""

from __future__ import annotations

import torch

from meshplan.compiler.kinds import A, P
from meshplan.compiler.rules.base import REP, Op, Strategy, broadcast, is_float, linear_in
from meshplan.plan.placements import Shard

# Elementwise, though torch does not tag them so.
ELEMENTWISE = frozenset(
    "_to_copy clone detach alias copy masked_fill zeros_like ones_like full_like empty_like fill where lerp addcmul addcdiv "
    "contiguous lift_fresh zero type_as to relu6 silu gelu mish softplus hardswish leaky_relu elu celu selu log_sigmoid_forward "
    "nan_to_num isnan isinf isfinite polar complex".split()
)
UNARY_LINEAR = frozenset("neg clone detach alias contiguous _to_copy to lift_fresh real imag".split())


def is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether aten `func` computes each output element from the elements at the same place."""
    name = func.overloadpacket.__name__
    return torch.Tag.pointwise in func.tags or name.rstrip("_") in ELEMENTWISE or name in ELEMENTWISE


def pointwise(op: Op, n: int) -> list[Strategy]:
    """Shard any dim of the broadcast output. A dim of size 1 is broadcast and stays whole. Partial sums: see `_partial`."""
    if not op.outs:
        return []
    shape = op.outs[0].shape
    if op.name.endswith("_") and op.ins and op.ins[0].shape != shape:
        return []
    found = [Strategy(kinds, (Shard(d),) * len(op.outs)) for kinds, d in broadcast(op.ins, shape)]
    return found + _partial(op)


def _partial(op: Op) -> list[Strategy]:
    name = op.name[:-1] if op.name.endswith("_") and not op.name.endswith("__") else op.name
    if not (op.outs and is_float(op.outs[0])):
        return []
    if name in UNARY_LINEAR:
        # A cast to another float type rounds, as any reordering of the sum does; a cast to integers is not linear.
        return linear_in(op, 0) if is_float(op.ins[0]) else []
    if name in ("add", "sub", "rsub"):
        if len(op.ins) == 1:  # tensor + number: a number would be added once per rank, but a mean keeps it once
            return [Strategy((A,), (A,))]
        both = linear_in(op, 0, 1)
        return [*both, Strategy((A, REP), (A,)), Strategy((REP, A), (A,))]
    if name == "mul":
        return linear_in(op, 0) + (linear_in(op, 1) if len(op.ins) > 1 else [])
    if name in ("div", "true_divide"):
        if op.kwargs.get("rounding_mode") is not None:
            return []
        return linear_in(op, 0)
    if name == "copy":
        return linear_in(op, 0, 1) if len(op.ins) == 2 else []
    if name == "masked_fill":
        value = op.args[2] if len(op.args) > 2 else op.kwargs.get("value")
        if not isinstance(value, torch.Tensor) and value == 0:
            return [Strategy((kind, REP), (kind,)) for kind in (P, A)]
        return []
    if name == "where" and len(op.ins) == 3:
        return [Strategy((REP, kind, kind), (kind,)) for kind in (P, A)]
    return []
