"""Writes in place: what shares memory with the tensor written, and what was redistributed before the write, follow it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.verify.aligned import align


class Between(nn.Module):
    """A split projection, one operation in the middle, a split projection back: [4, 6, 8] -> 0-dim."""

    def __init__(self, middle: Callable[["Between", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.whole, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 5)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self, self.up(x), self.whole(x))).pow(2).sum()


def _filled_by_parts(m: Between, split: Tensor, whole: Tensor) -> Tensor:
    """Heads and a vector that all heads share, written side by side into fresh memory, as latent attention does."""
    heads, shared = split.view(*split.shape[:2], 4, 3), whole[..., :2].unsqueeze(2)
    made = heads.new_empty(*heads.shape[:-1], 5)
    made[..., :3].copy_(heads)
    made[..., 3:].copy_(shared.expand(-1, -1, heads.shape[2], -1))
    return (made[..., 1:4] * made[..., 2:]).flatten(2)


def _whole_filled_by_parts(m: Between, split: Tensor, whole: Tensor) -> Tensor:
    """The same of replicated values, of which each rank then uses its own part."""
    made = whole.new_empty(whole.shape)
    made[..., :5].copy_(whole[..., 7:])
    made[..., 5:].copy_(whole[..., :7])
    return split * made


def _written_after_a_gather(m: Between, split: Tensor, whole: Tensor) -> Tensor:
    h = split.sin()
    before = F.softmax(h, -1)
    h.mul_(2.0)
    return (before + F.softmax(h, -1)) * split


def _written_through_a_view_after_a_gather(m: Between, split: Tensor, whole: Tensor) -> Tensor:
    h = split.sin()
    before = F.softmax(h, -1)
    h[:, :2].mul_(2.0)
    return (before + F.softmax(h, -1)) * split


CASES = [_filled_by_parts, _whole_filled_by_parts, _written_after_a_gather, _written_through_a_view_after_a_gather]


@pytest.mark.parametrize("middle", CASES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}])
def test_values_and_gradients_are_those_of_one_device(middle: Callable[..., Tensor], mesh: dict[str, int]) -> None:
    rules = [
        mp.Rule("up", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}),
        mp.Rule("down", params={"weight": {"tp": mp.S(1)}}),
    ]
    x = mp.Input(shape=(4, 6, 8), dtype=torch.float64, place={"dp": mp.S(0)})
    plan = mp.Plan(mesh=mesh, inputs={"x": x}, rules=rules if "tp" in mesh else [])
    assert align(Between(middle), plan, 2).distance < 1e-9


class Handed(nn.Module):
    """A module that writes into what it was handed, after it used it whole."""

    def forward(self, h: Tensor) -> Tensor:
        before = F.softmax(h, -1)
        h.mul_(2.0)
        return before + F.softmax(h, -1)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 12), Handed(), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x).sin())).pow(2).sum()


def test_a_module_that_writes_into_its_input_is_exact_or_refused() -> None:
    rules = [
        mp.Rule("up", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}}),
        mp.Rule("down", params={"weight": {"tp": mp.S(1)}}),
    ]
    plan = mp.Plan(mesh={"tp": 2}, inputs={"x": mp.Input(shape=(4, 6, 8), dtype=torch.float64)}, rules=rules)
    assert align(Around(), plan, 2).distance < 1e-9


class Summed(nn.Module):
    """A mean loss a part of the output, added up in place to a zero, as some models with several heads do."""

    def __init__(self, keep_view: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.keep_view = nn.Linear(8, 12), nn.Linear(12, 6), keep_view

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.down(self.up(x).sin())
        loss = torch.zeros([], dtype=x.dtype)
        held = loss.view(1) if self.keep_view else None
        for part, labelled in zip(h.split(2, 1), labels.split(2, 1), strict=True):
            loss += F.cross_entropy(part.flatten(0, 1), labelled.flatten())
        return loss / 3 if held is None else loss / 3 + held.sum()


def test_mean_losses_are_added_in_place_to_a_zero() -> None:
    inputs = {
        "x": torch.linspace(-1, 1, 4 * 6 * 8, dtype=torch.float64).sin().reshape(4, 6, 8),
        "labels": torch.arange(24).reshape(4, 6).remainder(6),
    }
    inputs["labels"][0, :5] = inputs["labels"][3, 1:3] = -100  # so that the ranks' token counts differ
    place = {name: mp.Input(shape=tuple(x.shape), dtype=x.dtype, place={"dp": mp.S(0)}) for name, x in inputs.items()}
    plan = mp.Plan(mesh={"dp_shard": 2}, inputs=place)
    assert align(Summed(), plan, 2, inputs=inputs).distance < 1e-12
    mp.lower(Summed(), plan, 2)  # its check of each rule asks for no gradient of the zero
    with pytest.raises(mp.PlanError) as refused:  # the view would still count as equal on all ranks
        mp.lower(Summed(keep_view=True), plan, 2)
    assert refused.value.code == "in-place"
