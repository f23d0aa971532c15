"""A block of experts on a rank: its own forward on this rank's tokens, its experts on the ranks that have them.

    share       tokens that other ranks hold too are cut; each takes a stretch of their longest dim       (`copies`)
    first run   the block's forward, whose experts note their rows (see `replay.py`)
    exchange    `routed_experts`, each noted row a token with one choice and a weight of one              (`group`)
    second run  the block's forward, whose experts return the results
    buffers     what it added to those that count tokens, summed over all ranks with tokens of their own  (`split`)
    join        the results of the ranks that shared out their tokens are gathered

All ranks issue the same collectives for any routing, and for any number of tokens, none included: what a rank returns depends,
with gradients of zeros, on everything that it would depend on if it had some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.ops.derivative import require_first
from meshplan.ops.experts.block import Block, Law, Made, opaque_results, tokens_of
from meshplan.ops.experts.call import opaque
from meshplan.ops.experts.contract import Body
from meshplan.ops.experts.replay import Buffers, Replay, contract
from meshplan.runtime.boundary import move
from meshplan.runtime.comm import AxisGroup

Dispatch = Callable[[Tensor, Tensor, Tensor, Body], Tensor]
"""`dispatch(tokens [T, H], indices [T, k], weights [T, k], body) -> [T, H]`, see `routed_experts`."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """The ranks that a block runs with.

    Attributes:
        group: those that share one copy of its experts, of which rank r of n computes with numbers r E/n to (r + 1) E/n - 1.
        copies: those with the same tokens, of which each takes a share.
        split: all that have tokens of their own then.
        dispatch: `routed_experts` over `group`.
    """

    group: AxisGroup
    copies: AxisGroup
    split: AxisGroup
    dispatch: Dispatch


def run_block(own: Block, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where) -> list[Tensor]:
    """The tensors that the block returns for this rank's tokens, in place of `block_call`.

    Raises PlanError `experts-contract` where a run does something that its trial did not, and what `routed_experts` raises.
    """
    leaves, structure = compat.flatten((args, kwargs))
    law = own.laws(leaves, structure)
    tokens = tokens_of(leaves, own.path)
    lead = tuple(tokens.shape[:-1])
    dim = max(range(len(lead)), key=lambda d: lead[d])
    if where.copies.size > 1:
        leaves = [_share(x, where.copies, dim) if isinstance(x, Tensor) else x for x in leaves]
    call = _Call(own, law, leaves, structure, where)
    made = call.run()
    if where.copies.size > 1:
        mine = call.lead
        made = [_joined(t, m, mine, lead, dim, where.copies) for t, m in zip(made, law.made, strict=True)]
    return list(_Sealed.apply(*made))


def _share(x: Tensor, copies: AxisGroup, dim: int) -> Tensor:
    if not x.is_floating_point():
        return copies.shard(x, dim)
    return move(x, "I", "S", copies, dim, x.shape[dim])


def _joined(t: Tensor, m: Made, mine: Sequence[int], lead: Sequence[int], dim: int, copies: AxisGroup) -> Tensor:
    at = m.place(dim)
    t = t.reshape(m.apart(mine))
    whole = move(t, "S", "I", copies, at, lead[dim]) if m.grad else copies.all_gather(t, at, lead[dim])
    return whole.reshape(m.shape(lead))


class _Call:
    """One call of a block on tokens of this rank's own."""

    def __init__(self, own: Block, law: Law, leaves: list[Any], structure: Any, where: Where) -> None:
        self.own, self.law, self.leaves, self.structure, self.where = own, law, leaves, structure, where
        self.tokens = tokens_of(leaves, own.path)
        self.lead = tuple(self.tokens.shape[:-1])
        self.fake = compat.is_fake(self.tokens)
        self.experts = own.experts()
        inside = {id(p): seen for e in self.experts for p, seen in _parameters(e)}
        self.of_experts = list(inside.values())
        self.others = [seen for p, seen in _parameters(own.module) if id(p) not in inside]
        self.names = (*law.summed, *(name for name, _ in law.counted))

    def run(self) -> list[Tensor]:
        buffers = Buffers(self.own.module, self.names)
        watched = self._others_watched()
        if self.where.group.size > 1:
            made = self._routed(buffers)
        else:
            made = self._plain()
        if watched != self._others_watched():
            raise contract(self.own.path, "it changes a buffer that it left alone when it was tried")
        self._count(buffers)
        if not math.prod(self.lead) and not self.fake:
            made = [_tied(t, [self.tokens, *self.others], m.grad) for t, m in zip(made, self.law.made, strict=True)]
        if self.law.idle and not self.fake:
            # Somebody calls each of them: gradients are zeros then, and missing on no rank.
            made = [_tied(t, self.of_experts, m.routed) for t, m in zip(made, self.law.made, strict=True)]
        return made

    def _own(self) -> Any:
        args, kwargs = compat.unflatten(list(self.leaves), self.structure)
        return self.own.own(*args, **kwargs)

    def _plain(self) -> list[Tensor]:
        """All experts are here."""
        if self.fake:
            return opaque_results(self.law, self.tokens, (*self.of_experts, *self.others))
        return self._tensors(self._own()) if math.prod(self.lead) else self._empty()

    def _routed(self, buffers: Buffers) -> list[Tensor]:
        replay, some = Replay(self.experts, self.own.path), math.prod(self.lead) > 0
        if self.fake:
            number = math.prod(self.lead) * self.law.rows
            rows = opaque(self.tokens.new_empty((number, self.law.width)), (self.tokens, *self.others))
            numbers = torch.zeros(number, dtype=torch.int64, device=rows.device)
        else:
            if some:
                replay.first(self._own)
                buffers.put_back()
            found = replay.rows()
            if found is None:
                found = self.tokens.new_zeros((0, self.law.width))
            # They ask for gradients where any rank's do: legs of an exchange have theirs on all ranks or on none.
            rows = _Tied.apply(found, False, self.tokens, *self.others)
            numbers = torch.tensor(replay.numbers, dtype=torch.int64).to(rows.device)
        if rows.shape[1] != self.law.width or rows.dtype != self.tokens.dtype:
            raise contract(self.own.path, f"an expert is called with rows {rows.shape[1]} {rows.dtype}")
        results = self.where.dispatch(rows, numbers[:, None], rows.new_ones((rows.shape[0], 1)), self._body())
        if self.fake:
            return opaque_results(self.law, self.tokens, (results, *self.others))
        made = self._tensors(replay.second(self._own, results)) if some else self._empty()
        return [_tied(t, [results], m.routed) for t, m in zip(made, self.law.made, strict=True)]

    def _body(self) -> Body:
        local = len(self.experts) // self.where.group.size
        mine = self.experts[self.where.group.rank * local :][:local]

        def body(x: Tensor, counts: tuple[int, ...]) -> Tensor:
            if self.fake:
                return opaque(x, tuple(seen for e in mine for _, seen in _parameters(e)))
            parts = zip(mine, x.split(list(counts)), strict=True)
            made = [e(part) for e, part in parts if part.shape[0] or self.law.idle]
            return torch.cat(made) if made else x

        return body

    def _tensors(self, out: Any) -> list[Tensor]:
        made = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor)]
        want = [m.shape(self.lead) for m in self.law.made]
        if [tuple(t.shape) for t in made] != want:
            raise contract(
                self.own.path, f"it returns {[list(t.shape) for t in made]} for tokens {list(self.tokens.shape)}"
            )
        return made

    def _empty(self) -> list[Tensor]:
        """Of no tokens; the block's own code may not take none."""
        return [self.tokens.new_zeros(m.shape(self.lead), dtype=m.dtype or self.tokens.dtype) for m in self.law.made]

    def _others_watched(self) -> list[tuple[int, int]]:
        return [(id(b), b._version) for name, b in self.own.module.named_buffers() if name not in self.names]

    def _count(self, buffers: Buffers) -> None:
        """Give buffers what this call adds to them on one device; nothing if it runs again in backward."""
        if not self.names:
            return
        added = buffers.added()
        if not self.fake:
            buffers.put_back()
        summed = added[: len(self.law.summed)]
        for dtype in dict.fromkeys(t.dtype for t in summed):
            these = [t for t in summed if t.dtype == dtype]
            compat.unpack_into(these, self.where.split.all_reduce(compat.packed(these)))
        if self.fake or compat.in_backward():
            return
        counted = [delta.to(t) for (_, delta), t in zip(self.law.counted, added[len(summed) :], strict=True)]
        buffers.add([*summed, *counted])


def _parameters(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter of `module`, and as its code sees it while the model runs, which may be a view."""
    held = {id(p): (p, m, name) for m in module.modules() for name, p in m._parameters.items() if p is not None}
    return ((p, getattr(m, name)) for p, m, name in held.values())


def _tied(t: Tensor, others: Sequence[Tensor], tied: bool) -> Tensor:
    """`t`, of which `others` get gradients of zeros, where `tied`."""
    return _Tied.apply(t, True, *others) if tied and others else t  # type: ignore[no-any-return]


class _Tied(torch.autograd.Function):
    """The first of its arguments as if it depended on the others, whose gradients are zeros if `owed`, and nothing otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owed: bool, *others: Tensor) -> Tensor:
        ctx.owed, ctx.like = owed, [(t.shape, t.dtype, t.device) for t in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        require_first("experts")
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if ctx.owed and needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        ]
        return grad, None, *zeros


class _Sealed(torch.autograd.Function):
    """Its arguments, as tensors that nobody else looks at. It keeps something for backward: a recompute that ends where
    everything has been kept again ends behind the last collective here, and not before it."""

    @staticmethod
    def forward(ctx: Any, *made: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(made[0].new_empty(()))
        out = tuple(t.clone() for t in made)
        ctx.mark_non_differentiable(*(o for o, t in zip(out, made, strict=True) if not t.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        require_first("experts")
        ctx.saved_tensors  # noqa: B018
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))
