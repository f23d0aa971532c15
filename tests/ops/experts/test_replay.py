"""A block's forward in two runs computes, and differentiates to, what one run does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.ops.experts.replay import Buffers, Replay
from tests.distributed.moe_blocks import Counting, Masked, Sorted


def replayed(block: nn.Module, experts: list[nn.Module], x: Tensor) -> Any:
    replay = Replay(experts, "block")
    names = [name for name, _ in block.named_buffers()]
    buffers = Buffers(block, names)
    replay.first(lambda: block(x))
    buffers.put_back()
    rows, numbers = replay.rows(), torch.tensor(replay.numbers)
    assert rows is not None
    made = torch.empty_like(rows)
    for e in numbers.unique().tolist():
        at = torch.where(numbers == e)[0]
        made = made.index_copy(0, at, experts[e](rows[at]))
    return replay.second(lambda: block(x), made)


@pytest.mark.parametrize("kind", [Masked, Counting, Sorted])
def test_results_and_gradients_are_those_of_one_run(kind):
    torch.manual_seed(0)
    block = kind(experts=5, k=2).double()
    experts = [m for m in block.experts.children() if next(m.parameters(), None) is not None]
    x = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 7, 12, dtype=torch.float64)

    def gradients(out: Any) -> tuple[Tensor, list[Tensor | None]]:
        out = out[0] if isinstance(out, tuple) else out
        every = [x, *block.parameters()]
        return out.detach(), list(torch.autograd.grad(out, every, grad, allow_unused=True))

    want, wanted = gradients(block(x))
    held = {name: b.clone() for name, b in block.named_buffers()}
    got, found = gradients(replayed(block, experts, x))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for name, b in block.named_buffers():  # the second run's alone: as the first, direct one had added
        before = torch.zeros_like(b) if name in ("load", "calls") else b
        assert torch.equal(b - held[name], held[name] - before if name in ("load", "calls") else torch.zeros_like(b))


class Fed(nn.Module):
    """The second expert gets what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[1](self.experts[0](x))


class Fickle(Fed):
    """Calls fewer experts in its second run."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return sum(e(x) for e in list(self.experts)[: 3 - self.runs])  # type: ignore[return-value]


class Told(Fed):
    """Experts are told something beside their rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x, x)


@pytest.mark.parametrize(
    ("kind", "said"), [(Fed, "another returned"), (Fickle, "a second run"), (Told, "something else")]
)
def test_what_two_runs_cannot_do_is_refused(kind, said):
    block = kind()
    with pytest.raises(PlanError) as caught:
        replayed(block, list(block.experts), torch.randn(3, 4))
    assert caught.value.code == "experts-contract" and said in caught.value.message
    assert all("forward" not in e.__dict__ for e in block.experts)  # nothing is left behind


def test_rows_that_are_no_numbers_are_equal_to_themselves():
    block = Masked(experts=3, k=1)
    x = torch.randn(1, 5, 12)
    x[0, 2, 3] = float("nan")
    assert replayed(block, list(block.experts), x)[0].isnan().any()


class Assigning(nn.Module):
    """Takes a new tensor for its buffer, where the other is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("new", torch.tensor([1.0, 2.0]))
        self.register_buffer("same", torch.tensor([3, 4]))

    def forward(self, x: Tensor) -> None:
        self.new = self.new + x
        self.same += 1


def test_buffers_are_put_back_and_counted_once_however_they_are_changed():
    block = Assigning()
    new, same = block.new, block.same
    buffers = Buffers(block, ["new", "same"])
    block(torch.tensor([0.5, 0.0]))
    assert [d.tolist() for d in buffers.added()] == [[0.5, 0.0], [1, 1]]
    buffers.put_back()
    assert block.new is new and block.same is same and block.new.tolist() == [1, 2] and block.same.tolist() == [3, 4]
    block(torch.tensor([0.5, 0.0]))
    buffers.add([torch.tensor([2.0, 1.0]), torch.tensor([5, 6])])
    assert block.new.tolist() == [3, 3] and block.same is same and same.tolist() == [8, 10]
    assert new.tolist() == [1, 2]  # somebody may hold it
