"""Rows on their way between ranks, as autograd sees it: gradients go the way back, and other work may run meanwhile.

    forward    start there   meanwhile                 wait          read from left to right
    backward   wait          the backward of meanwhile start back    read from right to left

Of the nodes that are ready autograd runs the one made last: so all of `meanwhile` comes between start and wait in backward too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshplan.ops.derivative import require_first
from meshplan.ops.experts.payload import pack, unpack
from meshplan.runtime.comm import AxisGroup, Pending

Start = Callable[[Tensor], Pending]


class Leg:
    """An exchange of rows, and that of their gradients.

    Arguments:
        there, back: start them.
        payload: what the rows are on the way there (see `payload.py`); gradients travel as they are.
    """

    __slots__ = ("_arriving", "_back", "_payload", "_there", "_under_way")

    def __init__(self, there: Start, back: Start, payload: str | None = None) -> None:
        self._there, self._back, self._payload = there, back, payload
        self._under_way: Pending | None = None
        self._arriving: tuple[int, torch.dtype] | None = None

    def start(self, x: Tensor) -> None:
        """Send rows [N, H]."""
        self._arriving = (x.shape[1], x.dtype)
        self._under_way = self._there(x if self._payload is None else pack(x))

    def arrive(self) -> Tensor:
        """What came of rows, in the dtype that they were sent in."""
        assert self._arriving is not None
        came = self._came()
        return came if self._payload is None else unpack(came, *self._arriving)

    def start_back(self, grad: Tensor) -> None:
        """Send gradients of what came."""
        self._under_way = self._back(grad)

    def bring_back(self) -> Tensor:
        """What came of gradients."""
        return self._came()

    def _came(self) -> Tensor:
        assert self._under_way is not None
        came, self._under_way = self._under_way.wait(), None
        return came


def dealt(group: AxisGroup, send: list[int], receive: list[int], payload: str | None = None) -> Leg:
    """Rows to their ranks by uneven all_to_all."""
    return Leg(
        lambda x: group.start_all_to_all_uneven(x, send, receive),
        lambda grad: group.start_all_to_all_uneven(grad, receive, send),
        payload,
    )


def gathered(group: AxisGroup, payload: str | None = None) -> Leg:
    """Everyone's rows, equally many, to all: all_gather; of gradients the sum."""
    return Leg(group.start_all_gather, group.start_reduce_scatter, payload)


def summed(group: AxisGroup) -> Leg:
    """Each rank's share of the sum: reduce_scatter; of gradients everyone's."""
    return Leg(group.start_reduce_scatter, group.start_all_gather)


def travel(x: Tensor, leg: Leg, tie: Tensor | None = None, meanwhile: Callable[[], object] | None = None) -> Tensor:
    """The rows that `leg` brings.

    Arguments:
        tie: what the rows were computed from after it had arrived: that exchange then has its backward on every rank, also where
            no row came and the body returned something that does not depend on its input.
        meanwhile: run between start and wait; what autograd recorded of it runs between those of gradients.
    """
    if meanwhile is None:
        return _Travel.apply(x, tie, leg)  # type: ignore[no-any-return]
    placeholder = _Depart.apply(x, leg)
    meanwhile()
    return _Arrive.apply(placeholder, leg)  # type: ignore[no-any-return]


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor | None, leg: Leg) -> Tensor:
        ctx.leg = leg
        leg.start(x)
        out = leg.arrive()
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        require_first("experts")
        ctx.leg.start_back(grad)
        return ctx.leg.bring_back(), None, None


class _Depart(torch.autograd.Function):
    """Returns a tensor of the shape of the rows that leave, without memory of its own: nobody may look at rows under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leg: Leg) -> Tensor:
        ctx.leg = leg
        leg.start(x)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.leg.bring_back(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, leg: Leg) -> Tensor:
        ctx.leg, ctx.shape = leg, placeholder.shape
        # A group of one rank brings the very tensor that left.
        return leg.arrive().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first("experts")
        ctx.leg.start_back(grad)
        return grad.new_zeros(()).expand(ctx.shape), None
