"""The fake copy of the user's model: nothing of the user's is touched, also not by what is done to the copy."""

import copy
from typing import Any

import torch
from torch import nn

from meshplan import compat
from meshplan.compiler.skeleton import fake_copy, fake_world


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Each module's own attributes, as they are now; parameters, buffers and children aside."""
    kept = {"_parameters", "_buffers", "_modules"}
    return {
        path: {k: copy.copy(v) for k, v in m.__dict__.items() if k not in kept} for path, m in model.named_modules()
    }


def test_hooks_put_on_a_hollow_copy_are_not_on_the_users_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = attributes(model)
    with fake_world() as mode:
        made = fake_copy(model, mode, hollow={"1": model[1]})
    for module in made.modules():
        module.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)
        module.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True, always_call=True)
    assert attributes(model) == before


def test_a_hollow_copy_has_the_class_and_attributes_and_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    with fake_world() as mode:
        made = fake_copy(model, mode, hollow={"1": model[1]})
    assert type(made[1]) is nn.Linear and made[1].out_features == 5
    assert [n for n, _ in made.named_parameters()] == ["0.weight", "0.bias"]


def test_ties_survive_and_nothing_has_storage() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    with fake_world() as mode:
        made = fake_copy(model, mode, lambda name, p: (1, 3))
    assert made["a"].weight is made["b"].weight
    assert made["a"].weight.shape == (1, 3) and compat.is_fake(made["a"].weight)
    assert model["a"].weight.shape == (3, 3)


def test_the_random_state_is_put_back() -> None:
    state = torch.random.get_rng_state()
    with fake_world():
        torch.rand(3)
    assert torch.equal(state, torch.random.get_rng_state())
