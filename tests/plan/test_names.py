"""Names of modules and parameters: wrappers unseen, aliases together, adapters told."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshplan.errors import PlanError
from meshplan.plan.names import names_of, without_adapters, without_wrappers


class Wrapper(nn.Module):
    """Stands for OptimizedModule, which keeps the user's module under `_orig_mod`."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


def test_modules_in_wrappers_keep_their_names_and_are_the_users_own():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4)))
    inner = model[1]
    model[1] = checkpoint_wrapper(Wrapper(inner))
    names = names_of(model)
    assert [entry.name for entry in names.modules] == ["", "0", "1", "1.0"]
    entry = names.module_by_name["1"]
    assert entry.module is inner
    assert model.get_submodule(entry.path) is inner
    assert list(names.params_of(entry)) == ["0.weight", "0.bias"]
    weight = names.param_by_name["1.0.weight"]
    assert weight.name == "1._checkpoint_wrapped_module._orig_mod.0.weight"
    assert dict(model.named_parameters())[weight.name] is inner[0].weight


def test_a_module_that_really_is_compiled_keeps_its_names():
    model = nn.Sequential(torch.compile(nn.Linear(2, 3), backend="eager"))
    assert [entry.name for entry in names_of(model).modules] == ["", "0"]
    assert [entry.plain for entry in names_of(model).params] == [("0.weight",), ("0.bias",)]


def test_a_shared_module_is_one_entry_with_all_its_names_and_matches_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 2)})
    model["c"] = model["a"]
    names = names_of(model)
    assert [entry.names for entry in names.modules] == [("",), ("a", "c"), ("b",)]
    assert [entry.name for entry in names.match("{b,c}")] == ["a", "b"]
    assert [entry.name for entry in names.match("{a,c}")] == ["a"]


def test_tied_weights_are_one_parameter_with_all_its_names():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    names = names_of(model)
    (param,) = names.params
    assert param.names == ("embed.weight", "head.weight")
    assert names.param_by_name["head.weight"] is param


def test_containers_have_no_forward():
    names = names_of(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])))
    assert [entry.has_forward for entry in names.modules] == [True, False, True]


def test_names_that_adapters_changed_are_found_by_the_old_pattern():
    layer = nn.ModuleDict({"up": nn.ModuleDict({"base_layer": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1)})})
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([layer])})})})
    assert "base_model.model.layers.0.up.base_layer" in names_of(model).moved("layers.*.up")
    assert names_of(model).moved("layers.*.down") == []


def test_pieces_are_taken_out_whole_segments_at_a_time():
    assert without_wrappers("a._orig_mod.b._checkpoint_wrapped_module") == "a.b"
    assert without_wrappers("a_orig_mod.b") == "a_orig_mod.b"
    assert without_adapters("base_model.model.a.base_layer") == "a"
    assert without_adapters("my_base_layer.x") == "my_base_layer.x"


def test_a_lazy_parameter_is_refused():
    with pytest.raises(PlanError) as error:
        names_of(nn.Sequential(nn.LazyLinear(3)))
    assert error.value.code == "lazy-parameter"
