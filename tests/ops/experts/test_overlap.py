"""Shared experts compute while tokens are under way, and their gradients while those of tokens are: the order of events, on gloo
ranks, and the values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshplan.ops.experts.experts import routed_experts, with_shared
from meshplan.ops.experts.grouped import grouped_mlp
from meshplan.runtime.comm import AxisGroup, Pending
from tests.ops.experts.reference import Case, gloo_levels, indices, reference, simulated, tensors

METHODS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dedup": {"dedup": True},
    "fp8": {"payload": "fp8"},
    "allgather": {"dispatch": "allgather"},
    "twolevel": {"dispatch": "twolevel", "dedup": True, "nodes": 2},
}
CASE = Case((3, 0, 6, 2), k=3)


class Watched(Pending):
    def __init__(self, inner: Pending, number: int, log: list[str]) -> None:
        self.inner, self.number, self.log = inner, number, log

    def wait(self) -> Tensor:
        self.log.append(f"wait {self.number}")
        return self.inner.wait()


@dataclasses.dataclass(frozen=True)
class Watching(AxisGroup):
    """Writes down when an exchange is issued, and when it is waited for."""

    log: list[str] = dataclasses.field(default_factory=list, compare=False)

    def _watched(self, pending: Pending) -> Pending:
        number = sum(event.startswith("issue") for event in self.log)
        self.log.append(f"issue {number}")
        return Watched(pending, number, self.log)

    def start_all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return self._watched(super().start_all_to_all_uneven(x, send, receive))

    def start_all_gather(self, x: Tensor) -> Pending:
        return self._watched(super().start_all_gather(x))

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        return self._watched(super().start_reduce_scatter(x))


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.append(name)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"{ctx.name} backward")
        return grad * 2, None, None


def _events(method: str) -> list[list[str]]:
    log: list[str] = []
    given, world = dict(METHODS[method]), dist.group.WORLD
    group = Watching("ep", 4, dist.get_rank(), world.group_name, log=log)  # type: ignore[union-attr]
    if given.pop("nodes", None):
        watch = lambda g: Watching(g.axis, g.size, g.rank, g.name, log=log)  # noqa: E731
        given["levels"] = tuple(watch(g) for g in gloo_levels(2))
    rows = slice(sum(CASE.tokens[: group.rank]), sum(CASE.tokens[: group.rank + 1]))
    t = tensors(CASE)
    x, weights = (t[name][rows].clone().requires_grad_() for name in ("tokens", "weights"))

    def shared(x: Tensor) -> Tensor:
        return Noted.apply(Noted.apply(x, log, "shared 1"), log, "shared 2")  # type: ignore[no-any-return]

    out = with_shared(
        x, indices(CASE)[rows], weights, lambda x, c: Noted.apply(x, log, "experts"), shared,
        experts=CASE.experts, group=group, **given,
    )  # fmt: skip
    forward, log[:] = list(log), []
    out.backward(t["grad"][rows])
    return [forward, list(log)]


@pytest.mark.parametrize("method", METHODS)
def test_shared_experts_compute_between_issue_and_wait_both_ways(pool, method):
    ranks = pool.run(_events, method)
    for forward, backward in ranks:
        at = forward.index("shared 1")
        issued = forward[at - 1].split()
        assert issued[0] == "issue" and forward[at : at + 3] == ["shared 1", "shared 2", f"wait {issued[1]}"]
        # The experts, which need the rows, come after.
        assert forward.index("experts") > at + 2
        at = backward.index("shared 2 backward")
        issued = backward[at - 1].split()
        assert issued[0] == "issue" and backward.index("experts backward") < at - 1
        assert backward[at : at + 3] == ["shared 2 backward", "shared 1 backward", f"wait {issued[1]}"]
        # Whatever the routing, the same on every rank.
        assert [forward, backward] == ranks[0]


@pytest.mark.parametrize("frozen", ["", "tokens", "weights"])
@pytest.mark.parametrize("method", METHODS)
def test_the_sum_has_the_values_of_one_device(method, frozen):
    """shared(x) = w x beside experts that do nothing to a token: out = (w + sum of weights) x."""

    def work(case: Case, group: AxisGroup, options: dict[str, Any]) -> dict[str, Tensor | None]:
        rows = slice(sum(case.tokens[: group.rank]), sum(case.tokens[: group.rank + 1]))
        # Numbers that 8 bits hold.
        x = (torch.arange(case.tokens[group.rank] * 3) % 8).double().view(-1, 3).requires_grad_(frozen != "tokens")
        weights = tensors(case)["weights"][rows].clone().requires_grad_(frozen != "weights")
        w, e = (torch.full((), 0.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
        out = with_shared(
            x, indices(case)[rows], weights, lambda x, _: x * e, lambda x: x * w,
            experts=case.experts, group=group, **options,
        )  # fmt: skip
        out.sum().backward()
        total = weights.detach().sum(1, keepdim=True) * 0.5
        torch.testing.assert_close(out.detach(), (0.5 + total) * x.detach(), rtol=1e-12, atol=1e-12)
        assert w.grad is not None and w.grad.item() == x.sum().item()
        if x.grad is not None:
            torch.testing.assert_close(x.grad, (0.5 + total).expand(-1, 3), rtol=1e-12, atol=1e-12)
        if weights.grad is not None:
            expected = 0.5 * x.detach().sum(1, keepdim=True).expand(-1, case.k)
            torch.testing.assert_close(weights.grad, expected, rtol=1e-12, atol=1e-12)
        assert ((x.grad is None), (weights.grad is None)) == (frozen == "tokens", frozen == "weights")
        return {"e": e.grad}

    found = simulated(CASE, METHODS[method], work)
    chosen, weights = indices(CASE), tensors(CASE)["weights"]
    x = torch.cat([(torch.arange(n * 3) % 8).double().view(-1, 3) for n in CASE.tokens])
    for rank, each in enumerate(found):
        mine = torch.where(torch.div(chosen, CASE.experts // 4, rounding_mode="floor") == rank, weights, 0.0)
        expected = (mine.sum(1) * x.sum(1)).sum()
        torch.testing.assert_close(each["e"], expected, rtol=1e-12, atol=1e-12)


def test_one_rank_and_recompute():
    """A group of one rank sends nothing, but computes in the same order; run again in backward, gradients are the same."""
    case = Case((5,), k=2)
    expected = reference(case)
    t, group = tensors(case), AxisGroup("ep", 1, 0)
    params = {name: t[name].requires_grad_() for name in ("up", "down", "up_bias", "down_bias")}
    for again in (False, True):
        x, weights = (t[name].clone().requires_grad_() for name in ("tokens", "weights"))
        calls: list[int] = []

        def block(x: Tensor, weights: Tensor, calls=calls) -> Tensor:
            return routed_experts(
                x, indices(case), weights, lambda x, c: grouped_mlp(x, c, **params),
                experts=case.experts, group=group, meanwhile=lambda: calls.append(1),
            )  # fmt: skip

        out = checkpoint(block, x, weights, use_reentrant=False) if again else block(x, weights)
        out.backward(t["grad"])
        torch.testing.assert_close(out.detach(), expected["out"], rtol=1e-12, atol=1e-12)
        for name, grad in (("tokens", x.grad), ("weights", weights.grad)):
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
        assert len(calls) == 1 + again


def test_anomaly_detection_sees_no_rows_under_way():
    """It looks at every gradient for NaN, as soon as it is returned."""

    def work(case: Case, group: AxisGroup, options: dict[str, Any]) -> Tensor | None:
        x = torch.ones(2, 3, requires_grad=True)
        with_shared(
            x, torch.tensor([[0], [1]]), torch.ones(2, 1), lambda x, _: 2 * x, lambda x: 3 * x, experts=2, group=group
        ).sum().backward()
        return x.grad

    # Around all ranks: the mode is one for the process.
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=True):
        for grad in simulated(Case((2, 2)), {}, work):
            assert torch.equal(grad, torch.full((2, 3), 5.0))
