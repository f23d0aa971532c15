"""A model changed after it was parallelised is refused at its next call: the program is that of the model before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import plan_of, refused
from tests.faults.test_hooks import PLANS, TP, clamp, doubled, unit
from tests.faults.test_uneven import Mlp

pytestmark = pytest.mark.usefixtures("pool")


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def adapt(model: nn.Module) -> None:
    model.down = Adapter(model.down)


def replace_parameter(model: nn.Module) -> None:
    model.down.bias = nn.Parameter(model.down.bias.detach() * 2)


def tie(model: nn.Module) -> None:
    model.extra = model.down.bias


def change_with_hook(model: nn.Module) -> None:
    model.up.register_forward_hook(doubled)


def look(model: nn.Module) -> None:
    model.up.register_forward_hook(lambda _, args, out: None)


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "adapter": (adapt, "model-changed"),
    "parameter": (replace_parameter, "model-changed"),
    "another name": (tie, "model-changed"),
    "hook": (change_with_hook, "model-changed"),
    "look": (look, ""),
    "backward hook": (lambda m: m.down.register_full_backward_hook(lambda _, grads, __: grads), "gradient-hook"),
}


def changed(plan: mp.Plan, change: str) -> str:
    """On a rank: what the next call raises after a change, when an earlier one went well."""
    model = mp.parallelize(Mlp(6).double(), plan)
    batch = mp.shard_batch(model, {"x": torch.ones(4, 8, dtype=torch.float64)})
    model(**batch).backward()
    CHANGES[change][0](model)
    try:
        model(**batch).backward()
    except mp.PlanError as error:
        return error.code
    return ""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_lowering_is_refused_and_a_look_is_not(pool, change, plan):
    # ezpz#208: an adapter put in afterwards is sized by what it sees of the model, and nobody reduces its gradients.
    code = CHANGES[change][1]
    if (change, plan) == ("parameter", "fsdp"):
        code = ""  # FSDP finds a parameter by its place in the module, and takes the new one
    assert pool.run(changed, PLANS[plan], change, world=2) == [code, code]


def hook_on_parameter(plan: mp.Plan, post: bool) -> str:
    model = mp.parallelize(Mlp(6).double(), plan)
    p = model.up.weight
    p.register_post_accumulate_grad_hook(clamp) if post else p.register_hook(unit)
    batch = mp.shard_batch(model, {"x": torch.ones(4, 8, dtype=torch.float64)})
    try:
        model(**batch).backward()
    except mp.PlanError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    ("plan", "post", "code"),
    [
        ("tp", False, ""),  # a shard of the whole gradient, as a DTensor
        ("tp", True, ""),
        ("dp", False, "gradient-hook"),  # reduced after backward
        ("dp", True, "gradient-hook"),
        ("fsdp", False, "gradient-hook"),  # never called
        ("fsdp", True, ""),  # called when the reduced shard is there
    ],
)
def test_a_hook_on_a_parameter_put_on_afterwards_is_refused_where_it_would_see_a_part(pool, plan, post, code):
    assert pool.run(hook_on_parameter, PLANS[plan], post, world=2) == [code, code]


def own_forward() -> nn.Module:
    model = Mlp(6)
    before = model.up.forward
    model.up.forward = lambda x: before(x) * 3
    return model


def test_a_function_in_place_of_a_forward_that_holds_on_to_its_module_is_refused():
    # A copy of the model would go on computing with the weights of the original.
    error = refused(own_forward, TP, "foreign-parameter")
    assert error.module == "up" and error.where.line


def old_weight_norm() -> nn.Module:
    model = Mlp(6)
    model.up.scaled = model.up.weight * 2
    return model


def test_a_tensor_computed_from_parameters_and_kept_is_refused():
    plan = plan_of({"x": mp.Input(shape=(4, 8), place={"dp": mp.S(0)})}, mesh={"dp_shard": 2})
    error = refused(old_weight_norm, plan, "computed-attribute")
    assert "scaled" in error.message and error.module == "up"
