"""Which unit owns a parameter, in what order FSDP2 packs them, and the dim each is cut along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.compiler.fsdp_units import choose_shard_dim, fsdp_units, owned_parameters, resharding, shard_dim
from meshplan.errors import PlanError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.lin, self.sub = nn.Parameter(torch.ones(3)), nn.Linear(2, 3), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = Pair(), Pair(), nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _names(model: nn.Module, *units: str) -> dict[str, list[str]]:
    return {u.path: [name for name, _ in u.params] for u in owned_parameters(model, units)}


def test_a_parameter_belongs_to_the_innermost_unit_and_submodules_are_packed_first():
    pair = ["lin.weight", "lin.bias", "sub.weight", "sub.bias", "own"]
    assert _names(Tower(), "b.sub", "a") == {
        "": ["b.lin.weight", "b.lin.bias", "b.own", "out.weight"],
        "a": [f"a.{name}" for name in pair],
        "b.sub": ["b.sub.weight", "b.sub.bias"],
    }
    assert list(_names(Tower(), "b.sub", "a", "b")) == ["", "a", "b", "b.sub"]


def test_a_tied_parameter_belongs_to_the_unit_that_encloses_the_others():
    model = Tower()
    model.b.sub.weight = model.out.weight
    names = _names(model, "b", "b.sub")
    # named_parameters() gives it the first name it meets.
    assert names[""][-1] == "b.sub.weight" and names["b.sub"] == ["b.sub.bias"]
    (sub,) = (u for u in owned_parameters(model, ("b", "b.sub")) if u.path == "b.sub")
    assert sub.foreign == {model.out.weight}


def test_a_parameter_tied_between_units_side_by_side_is_refused():
    model = Tower()
    model.b.own = model.a.own
    with pytest.raises(PlanError) as error:
        owned_parameters(model, ("a", "b"))
    assert error.value.code == "tied-across-units" and "['a', 'b']" in str(error.value)
    assert _names(model, "a.sub", "b.sub")[""].count("a.own") == 1


@pytest.mark.parametrize(
    ("shape", "n", "dim"),
    [((8, 3), 4, 0), ((1, 8), 4, 1), ((3, 5, 12), 4, 2), ((5, 3), 4, 0), ((7,), 2, 0), ((6, 4), 4, 1), ((5, 3), 1, 0)],
)
def test_the_cut_is_along_the_first_dim_that_divides_else_dim_0(shape, n, dim):
    assert choose_shard_dim(shape, n) == dim


def _on_tp(shape: tuple[int, ...], split: int, degree: int) -> Any:
    """What `shard_dim` reads of a DTensor sharded along `split` over `degree` ranks."""
    placement = SimpleNamespace(is_shard=lambda: True, dim=split)
    mesh = SimpleNamespace(size=lambda axis: degree)
    return SimpleNamespace(shape=shape, placements=(placement,), device_mesh=mesh)


def test_all_ranks_of_an_uneven_split_choose_the_same_dim():
    # 7 rows on 2 tp ranks are 4 and 3: one of them would divide by 4, the other not.
    assert shard_dim(_on_tp((7, 8), 0, 2), 4) == 1
    assert shard_dim(_on_tp((7, 5), 0, 2), 4) == 0
    # Even splits count with what is left of them on a rank: 8 rows are 4, 8 columns are 4, 12 columns are 6.
    assert shard_dim(_on_tp((8, 5), 0, 2), 4) == 0
    assert shard_dim(_on_tp((3, 8), 1, 2), 4) == 1
    assert shard_dim(_on_tp((3, 12), 1, 2), 4) == 0


def test_resharding_follows_the_strategy_unless_overridden_and_never_touches_the_root():
    assert [resharding(s, "a") for s in ("zero1", "zero2", "zero3")] == [False, False, True]
    assert [resharding("zero2", path, {"a": True}) for path in ("a", "b", "")] == [True, False, False]
    assert [resharding("zero3", path, True) for path in ("a", "")] == [True, False]


def test_local_shapes_and_unused_parameters_are_told():
    halves = lambda name, p: (p.shape[0] // 2, *p.shape[1:])  # noqa: E731
    root, a = fsdp_units(
        Tower(), ("a",), shard=2, local_shape_of=halves, shard_dim_of=lambda p: -1, unused=frozenset({"a.own"})
    )
    by_name = {p.name: p for p in a.params}
    assert (by_name["a.sub.weight"].local_shape, by_name["a.sub.weight"].shard_dim) == ((2, 3), 1)
    assert [p.name for p in a.params if not p.used] == ["a.own"]
    assert root.is_root and not root.reshard_after_forward and a.reshard_after_forward
