"""Making gradients whole after backward: partial sums over axes such as tp, and means over data axes without FSDP.

Autograd leaves in `p.grad` what this rank's part of the computation gave. At the end of each backward the gradients that
are partial over the same axes travel together, flattened into buckets: one all_reduce a bucket instead of one a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.runtime.comm import AxisGroup

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Reduction:
    """Parameters whose gradients are reduced alike.

    Attributes:
        sums: groups over which gradients are partial sums.
        means: group of the data ranks over which they are averaged, or None (FSDP does it, or there is one rank).
        divisor: what the sum over them is divided by; None is their number.
        apart: those of `params` that a backward may reach on one rank and not on another. How many ranks did travels along: a
            gradient that comes to zero was there nevertheless.
    """

    params: tuple[nn.Parameter, ...]
    sums: tuple[AxisGroup, ...]
    means: AxisGroup | None
    divisor: int | None = None
    apart: tuple[nn.Parameter, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two reductions one: the same parameters, over the same groups."""
        means = self.means and self.means.axis
        return tuple(map(id, self.params)), tuple(group.axis for group in self.sums), means, self.divisor


def same(a: Sequence[Reduction], b: Sequence[Reduction]) -> bool:
    """Whether two programs reduce alike."""
    return [r.key for r in a] == [r.key for r in b]


def bucket_sizes(sizes: Sequence[tuple[int, str]], limit: int = BUCKET_BYTES) -> list[tuple[int, int, str]]:
    """How tensors of (elements, dtype name) are packed, in order: (tensors, elements, dtype) of each bucket. A bucket holds
    one dtype and up to `limit` bytes; a larger tensor is a bucket of its own."""
    out: list[tuple[int, int, str]] = []
    for elements, dtype in sizes:
        width = getattr(torch, dtype).itemsize
        if out and out[-1][2] == dtype and (out[-1][1] + elements) * width <= limit:
            out[-1] = (out[-1][0] + 1, out[-1][1] + elements, dtype)
        else:
            out.append((1, elements, dtype))
    return out


class Gradients:
    """Runs the reductions of one model, at the end of every backward through an output it watches."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self.reductions = [r for r in reductions if r.params]
        self.deferred = False  # inside `accumulate`, before its last microbatch
        self.accumulating = False
        self._now: list[Reduction] | None = None  # of the backward, or the accumulation, that is under way
        self._backward: int | None = None  # which backward has the work at its end
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self.others: Callable[[], Iterable[nn.Parameter]] = tuple  # whose gradients somebody else (FSDP2) makes whole

    def watch(self, x: Tensor) -> None:
        """Begin the work when the gradient of `x`, an output of the model, arrives: before anything inside the model.

        What is reduced, and how, is what the program says that made `x`: a later one may use other parameters."""
        if x.requires_grad:
            x.register_hook(partial(self._arrived, self.reductions))

    def _arrived(self, reductions: list[Reduction], grad: Tensor) -> None:
        if any(compat.returns_gradient(p) for p in (*self.others(), *(p for r in reductions for p in r.params))):
            raise PlanError(
                "torch.autograd.grad returns this rank's part of gradients that are partial over mesh axes", code="autograd-grad",
                legal="loss.backward(), which leaves whole gradients in p.grad",
            )  # fmt: skip
        self._begin(reductions)

    def _begin(self, reductions: list[Reduction]) -> None:
        number = compat.backward_number()
        if self._backward is not None and self._backward != number:
            self._put_back()  # that one failed, and never came to its end
        if self._backward is None and not self.accumulating:
            self._now = None
        if self._now is not None and not same(self._now, reductions):
            self._put_back()
            raise PlanError(
                "one backward pass, or one accumulation, goes through calls with different inputs, whose gradients are to be "
                "reduced over different axes", code="programs-mixed",
                legal="a backward of its own for each kind of call, or the same arguments in all of them",
            )  # fmt: skip
        if self._now is None:
            self._now = reductions
            self._hold()
        if self._backward is not None or self.deferred:
            return
        self._backward = number
        # FSDP2 queues its own callback in this backward; ours must come after it, hence queued from a callback.
        compat.on_backward_end(lambda: compat.on_backward_end(self._end))

    def hold(self) -> None:
        """An accumulation begins: set aside the gradients of earlier backwards."""
        self._now = None
        self._hold()

    def _put_back(self) -> None:
        for p, grad in self._held:
            p.grad = grad
        self._held.clear()
        self._now = self._backward = None

    def _hold(self) -> None:
        # They are whole already and must not be summed again.
        for reduction in self.reductions if self._now is None else self._now:
            for p in reduction.params:
                if p.grad is not None:
                    self._held.append((p, p.grad))
                    p.grad = None

    def _end(self) -> None:
        try:
            with torch.no_grad():
                for reduction in self._now or ():
                    self._reduce(reduction)
                for p, grad in self._held:
                    p.grad = grad if p.grad is None else p.grad + grad
        finally:
            self._held.clear()
            self._now = self._backward = None

    def _reduce(self, reduction: Reduction) -> None:
        # A parameter that this backward did not reach still takes part: other ranks may have reached it.
        missed = [p for p in reduction.params if p.requires_grad and p.grad is None]
        apart = [p for p in reduction.apart if p.requires_grad]
        came = [p.grad is not None for p in apart]
        grads = [_local(p) for p in reduction.params if p.requires_grad]
        if apart:
            grads.append(grads[-1].new_tensor(came))
        sizes = [(g.numel(), str(g.dtype).removeprefix("torch.")) for g in grads]
        at = 0
        for count, _, _ in bucket_sizes(sizes):
            bucket, at = grads[at : at + count], at + count
            flat = compat.packed(bucket)
            for group in reduction.sums:
                flat = group.all_reduce(flat)
            if reduction.means is not None:
                flat = reduction.means.all_reduce(flat).div_(reduction.divisor or reduction.means.size)
            compat.unpack_into(bucket, flat)
        reached = dict(zip(map(id, apart), grads[-1].tolist(), strict=True)) if apart and missed else {}
        for p in missed:
            if not (reached[id(p)] if id(p) in reached else _local(p).any()):
                p.grad = None  # no rank has: an optimizer leaves it alone, and does not let it decay


def _local(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    grad: Any = p.grad
    return grad._local_tensor if hasattr(grad, "_local_tensor") else grad
