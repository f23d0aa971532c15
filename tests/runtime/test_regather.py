"""Saved tensors of a gathered input: kept as the shard, gathered once a backward, gone after it."""

import weakref

import pytest
import torch
from torch import Tensor

from meshplan.runtime.regather import Keeping, gathering_again, keeping_shards


class TwoRanks:
    """A group of which the other rank holds twice what this one does; it counts its gathers."""

    def __init__(self) -> None:
        self.calls = 0

    def all_gather(self, x: Tensor, dim: int, size: int) -> Tensor:
        self.calls += 1
        return torch.cat([x, 2 * x], dim)


@pytest.fixture
def group() -> TwoRanks:
    return TwoRanks()


@pytest.fixture
def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def boundary(group: TwoRanks):
    return gathering_again(lambda x: torch.cat([x, 2 * x], 1), group, 1, 6)  # type: ignore[arg-type]


def project(whole: Tensor, weights: list[Tensor]) -> Tensor:
    return sum((whole @ w).pow(2).sum() for w in weights)  # type: ignore[return-value]


def shard() -> Tensor:
    return torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_gradients_are_those_of_the_kept_tensor_with_one_gather_for_all_uses(group, weights):
    x = shard()
    want = torch.autograd.grad(project(torch.cat([x, 2 * x], 1), weights), [x, *weights])
    convert = boundary(group)
    loss = keeping_shards(None)(lambda a: project(convert(a), weights), (x,), {})
    assert group.calls == 0
    got = torch.autograd.grad(loss, [x, *weights])
    assert group.calls == 1
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-13, atol=0)


def test_the_whole_tensor_dies_with_the_forward_and_again_with_the_backward(group, weights):
    alive: list[weakref.ref] = []
    convert = boundary(group)

    def run(x: Tensor) -> Tensor:
        whole = convert(x)
        alive.append(weakref.ref(whole))
        return project(whole, weights)

    loss = keeping_shards(None)(run, (shard(),), {})
    assert alive[0]() is None
    (kept,) = {id(s[0]): s[0] for s in packed(loss)}.values()
    loss.backward()
    assert kept.whole is None


def packed(loss: Tensor) -> list[tuple]:
    """The handles that nodes of the graph of `loss` keep."""
    found, todo, seen = [], [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                if isinstance(raw.data, tuple) and hasattr(raw.data[0], "shard"):
                    found.append(raw.data)
        todo += [n for n, _ in node.next_functions]
    return found


def test_a_kept_graph_gathers_once_for_each_backward(group, weights):
    convert = boundary(group)
    loss = keeping_shards(None)(lambda a: project(convert(a), weights), (shard(),), {})
    loss.backward(retain_graph=True)
    first = weights[0].grad.clone()
    loss.backward()
    assert group.calls == 2
    torch.testing.assert_close(weights[0].grad, 2 * first, rtol=1e-13, atol=0)


def test_a_backward_of_some_uses_keeps_nothing_behind(group, weights):
    convert = boundary(group)
    loss = keeping_shards(None)(lambda a: project(convert(a), weights), (shard(),), {})
    kept = packed(loss)[0][0]
    torch.autograd.grad(loss, [weights[1]], retain_graph=True)
    assert (group.calls, kept.whole) == (1, None)


def test_other_tensors_are_saved_as_they_are(group, weights):
    x = shard()
    with Keeping():
        loss = (x @ weights[0]).sum()
    loss.backward()
    assert group.calls == 0
    assert weights[0].grad is not None


def test_views_and_transposes_of_the_gathered_tensor_come_back_as_such(group, weights):
    x, convert = shard(), boundary(group)

    def turned(whole: Tensor) -> Tensor:
        return (whole[:, 1:4].transpose(0, 1) @ weights[0]).pow(2).sum()

    want = torch.autograd.grad(turned(torch.cat([x, 2 * x], 1)), [weights[0]])
    loss = keeping_shards(None)(lambda a: turned(convert(a)), (x,), {})
    torch.testing.assert_close(torch.autograd.grad(loss, [weights[0]]), want, rtol=1e-13, atol=0)
