"""Plan entries that miss, hit twice, or whose names an adapter or a wrapper moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import meshplan as mp
from meshplan.compiler.bind import bind
from tests.faults.check import exact, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, wrap: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(checkpoint_wrapper(Mlp()) if wrap else Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Wrapper(nn.Module):
    """A level of nesting around the block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Nested(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wrapper() for _ in range(2))


class Lora(nn.Module):
    """A low-rank adapter around a linear layer, with the names that adapter libraries use."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))


def adapted() -> nn.Module:
    model = Stack()
    for layer in model.layers:
        layer.up, layer.down = Lora(layer.up), Lora(layer.down)
    return model


X = {"x": numbers(3, 6)}
UP, DOWN = "layers.*.up", "layers.*.down"


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names():
    # pytorch#157182: stock warns and trains on, with zero parameters sharded.
    error = refused(Stack, plan_of(X, mp.Rule("layers.*.dwn", use="rowwise")), "no-such-module")
    assert "layers.*.dwn" in error.message and any("down" in name for name in error.legal)
    assert error.where.file == __file__ and error.where.line


def test_one_alternative_of_a_pattern_that_matches_nothing_is_refused():
    error = refused(Stack, plan_of(X, mp.Rule("layers.*.{up,gate}", use="colwise")), "no-such-module")
    assert "gate" in error.message and error.where.line


def test_a_parameter_that_does_not_exist_is_refused():
    error = refused(Stack, plan_of(X, mp.Rule(UP, params={"wieght": {"tp": mp.S(0)}})), "no-such-parameter")
    assert "weight" in str(error.legal) and error.where.line


def test_overlapping_wildcards_are_refused_unless_the_later_one_overrides():
    # pytorch#122968.
    early, late = (
        mp.Rule("**.up", use="colwise"),
        mp.Rule("layers.0.up", params={"weight": {"tp": mp.R}, "bias": {"tp": mp.R}}),
    )
    error = refused(Stack, plan_of(X, early, late), "two-rules")
    assert "'layers.0.up.weight'" in error.message and error.where.line
    late = mp.Rule(late.at, params=late.params, override=True)
    low = mp.lower(Stack(), plan_of(X, early, late), 2)
    assert {p["name"]: p["layout"]["tp"] for p in low.placements if p["name"].endswith("up.weight")} == {
        "layers.0.up.weight": "R",
        "layers.1.up.weight": "S(0)",
    }


def test_a_wildcard_is_one_segment_and_says_so_when_a_wrapper_is_between():
    # torchtune#2379.
    error = refused(Nested, plan_of(X, mp.Rule(UP, use="colwise")), "no-such-module")
    assert "layers.*.block.up" in error.legal
    exact(Nested, plan_of(X, mp.Rule("layers.**.up", use="colwise"), mp.Rule("layers.**.down", use="rowwise")))


def wrapped() -> nn.Module:
    return Stack(wrap=True)


def test_names_are_the_users_inside_a_checkpoint_wrapper():
    plan = plan_of({"x": numbers(4, 6, dp=mp.S(0))}, mesh={"dp_shard": 2}, fsdp=mp.Fsdp(units=["layers.*"]))
    exact(wrapped, plan)
    matched = bind(plan_of(X, mp.Rule(UP, use="colwise")), wrapped()).matches[0][1]
    assert [path.replace("._checkpoint_wrapped_module", "") for path in matched] == ["layers.0.up", "layers.1.up"]


def test_a_checkpoint_of_the_models_own_is_refused_around_communication_and_the_plans_is_exact():
    rules = (mp.Rule(UP, use="colwise"), mp.Rule(DOWN, use="rowwise"))
    error = refused(wrapped, plan_of(X, *rules), "own-checkpoint")
    assert "recompute" in error.legal and error.where.file == __file__
    exact(Stack, plan_of(X, *rules, recompute=mp.Recompute(units=["layers.*"])))


def test_a_plan_for_the_bare_model_says_what_an_adapter_moved():
    # peft#2394.
    error = refused(adapted, plan_of(X, mp.Rule(UP, use="colwise")), "adapter-moved")
    assert "base_layer" in str(error.legal) and error.where.line


def test_adapters_follow_their_base():
    # peft#3044: under a column split B is split and A whole, under a row split A is split and B whole.
    rules = (
        mp.Rule(f"{UP}.base_layer", use="colwise"),
        mp.Rule(f"{UP}.lora_B.default", use="colwise"),
        mp.Rule(f"{DOWN}.base_layer", use="rowwise"),
        mp.Rule(f"{DOWN}.lora_A.default", use="rowwise"),
    )
    exact(adapted, plan_of(X, *rules), steps=3)


def test_adapters_that_the_plan_does_not_mention_are_exact_too():
    rules = (mp.Rule(f"{UP}.base_layer", use="colwise"), mp.Rule(f"{DOWN}.base_layer", use="rowwise"))
    exact(adapted, plan_of(X, *rules))
