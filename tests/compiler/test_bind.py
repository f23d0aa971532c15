"""bind: what a plan means on a model, and each way in which it can mean nothing."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshplan.compiler.bind import bind
from meshplan.errors import PlanError
from meshplan.plan.placements import R, S
from meshplan.plan.plan import Input, Plan, Rule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x, mask=None):
        return self.down(self.up(self.norm(x))) * self.scale


class Model(nn.Module):
    def __init__(self, vocab=127, tied=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, 6)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def bound(*rules, model=None, mesh=None, **sections):
    plan = Plan(mesh or {"tp": 2}, rules=rules, **sections)
    return bind(plan, Model() if model is None else model)


def refused(*rules, **kwargs):
    with pytest.raises(PlanError) as error:
        bound(*rules, **kwargs)
    return error.value


def test_a_bound_plan_holds_every_parameter_and_the_declared_modules():
    result = bound(
        Rule("layers.*.up", use="colwise"),
        Rule("layers.*.down", use="rowwise", output={"tp": S(1)}),
        Rule("embed", use="embedding"),
        Rule("layers.1.norm", use="sequence"),
    )
    assert list(result.params) == [name for name, _ in Model().named_parameters()]
    assert result.params["layers.2.up.weight"].placements == {"tp": S(0)}
    assert result.params["layers.2.down.weight"].placements == {"tp": S(1)}
    assert result.params["layers.0.norm.weight"].placements == {}
    assert result.params["layers.0.norm.weight"].where is None
    assert result.params["layers.1.norm.bias"].placements == {"tp": R}
    assert result.modules["layers.0.down"].input == {"input": {"tp": S(-1)}}
    assert result.modules["layers.0.down"].output == {"": {"tp": S(1)}}
    assert list(result.modules) == [
        "embed",
        *(f"layers.{i}.{name}" for i, name in [(0, "up"), (0, "down"), (1, "norm"), (1, "up"), (1, "down")]),
        *("layers.2.up", "layers.2.down"),
    ]
    assert result.params["embed.weight"].shape == (127, 6)


def test_binding_works_on_meta_and_leaves_the_model_as_it_was():
    with torch.device("meta"):
        model = Model()
    before = {name: (id(p), set(vars(m))) for name, m in model.named_modules() for p in m.parameters()}
    bound(Rule("layers.*.up", use="colwise"), model=model)
    assert before == {name: (id(p), set(vars(m))) for name, m in model.named_modules() for p in m.parameters()}


def test_tied_names_are_one_parameter_with_one_layout():
    result = bound(Rule("head", use="vocab_head"))
    weight = result.params["embed.weight"]
    assert weight.names == ("embed.weight", "head.weight")
    assert weight.placements == {"tp": S(0)}
    both = bound(Rule("embed", use="embedding"), Rule("head", use="vocab_head"))
    assert both.params["embed.weight"].placements == {"tp": S(0)}


def test_tied_names_with_two_layouts_are_refused():
    error = refused(Rule("embed", params={"weight": {"tp": S(1)}}), Rule("head", use="vocab_head"))
    assert error.code == "tied-layouts"
    assert "embed.weight" in str(error) and "head.weight" in str(error)
    assert refused(
        Rule("embed", params={"weight": {"tp": S(1)}}), Rule("{embed,head}", params={"weight": {"tp": S(0)}})
    )


def test_negative_dims_of_parameters_count_from_the_front():
    result = bound(Rule("layers.0.up", params={"weight": {"tp": S(-1)}, "bias": {"tp": S(-1)}}))
    assert result.params["layers.0.up.weight"].placements == {"tp": S(1)}
    assert result.params["layers.0.up.bias"].placements == {"tp": S(0)}


def test_a_rule_may_reach_a_parameter_below_its_module_by_a_dotted_name():
    result = bound(Rule("layers.[0-1]", params={"up.weight": {"tp": S(0)}}))
    declared = [name for name, param in result.params.items() if param.placements]
    assert declared == ["layers.0.up.weight", "layers.1.up.weight"]


@pytest.mark.parametrize(
    ("at", "nearest"),
    [("layers.*.upp", "layers.*.up"), ("layer.*.up", "layers.*.up"), ("layers.*.mlp.up", "layers.*.up")],
)
def test_a_rule_that_matches_nothing_names_the_nearest_modules(at, nearest):
    error = refused(Rule(at, use="colwise"))
    assert error.code == "no-such-module"
    assert error.legal[0] == nearest
    assert error.where.file == __file__


def test_an_alternative_that_matches_nothing_is_an_error_too():
    error = refused(Rule("layers.*.{up,dwn}", use="colwise"))
    assert error.code == "no-such-module"
    assert "'dwn'" in str(error) and "down" in error.legal


def test_wrappers_do_not_change_what_a_rule_matches():
    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    result = bound(Rule("layers.*.up", use="colwise"), Rule("layers.*", input={"mask": {"tp": R}}), model=model)
    assert result.matches[0][1] == (
        "layers.0._checkpoint_wrapped_module.up",
        "layers.1.up",
        "layers.2.up",
    )
    # The wrapper takes (*args, **kwargs); the argument's name is that of the wrapped module.
    assert result.modules["layers.0._checkpoint_wrapped_module"].input == {"mask": {"tp": R}}


class Adapter(nn.Module):
    """Stands where an adapter library puts its wrapper."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora_A = base, nn.Linear(6, 2, bias=False)

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.parametrize("rule", [{"use": "colwise"}, {"params": {"weight": {"tp": S(0)}}}])
def test_a_parameter_that_an_adapter_moved_is_told_with_its_new_name(rule):
    model = Model()
    for layer in model.layers:
        layer.up = Adapter(layer.up)
    error = refused(Rule("layers.*.up", **rule), model=model)
    assert error.code == "adapter-moved"
    assert "base_layer" in str(error.legal)
    assert bound(Rule("layers.*.up.base_layer", use="colwise"), model=model)


def test_a_prefix_that_an_adapter_added_is_told():
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": Model()})})
    error = refused(Rule("layers.*.up", use="colwise"), model=model)
    assert error.code == "adapter-moved"
    assert "base_model.model.layers.0.up" in str(error)


def test_two_rules_for_one_thing_are_refused_and_both_are_named():
    error = refused(Rule("**.up", use="colwise"), Rule("layers.0.up", params={"weight": {"tp": S(1)}}))
    assert error.code == "two-rules"
    assert "layers.0.up.weight" in str(error) and "**.up" in str(error)
    assert refused(Rule("layers.0", output={"tp": R}), Rule("layers.*", output={0: {"tp": R}})).code == "two-rules"


def test_two_rules_for_different_axes_or_sides_stand_together():
    result = bound(
        Rule("layers.0", input={"tp": S(1)}),
        Rule("layers.*", input={"x": {"cp": S(1)}}),
        Rule("layers.*", output={"tp": R}),
    )
    assert result.modules["layers.0"].input == {"x": {"tp": S(1), "cp": S(1)}}
    assert result.modules["layers.0"].output == {"": {"tp": R}}


def test_a_later_rule_may_override_and_only_what_it_says():
    result = bound(Rule("**.up", use="colwise"), Rule("layers.0.up", params={"weight": {"tp": S(1)}}, override=True))
    assert result.params["layers.0.up.weight"].placements == {"tp": S(1)}
    assert result.params["layers.0.up.bias"].placements == {"tp": S(0)}
    assert result.params["layers.1.up.weight"].placements == {"tp": S(0)}
    assert refused(Rule("layers.0.up", params={"weight": {"tp": S(1)}}, override=True), Rule("**.up", use="colwise"))


def test_a_shared_module_is_bound_once_under_its_first_path():
    model = Model()
    model.layers[2] = model.layers[0]
    result = bound(Rule("layers.*.up", use="colwise"), model=model)
    assert result.matches[0][1] == ("layers.0.up", "layers.1.up")
    assert result.modules["layers.0.up"].paths == ("layers.0.up", "layers.2.up")
    assert result.params["layers.0.up.weight"].names == ("layers.0.up.weight", "layers.2.up.weight")
    error = refused(Rule("layers.0.up", use="colwise"), Rule("layers.2.up", use="colwise"), model=model)
    assert error.code == "two-rules"


def test_axes_of_degree_one_and_axes_left_out_are_declared_and_do_nothing_else():
    for mesh in ({"tp": 1}, {"dp_shard": 2}):
        result = bound(Rule("layers.*.up", use="colwise", input={"cp": S(1)}), mesh=mesh)
        assert result.params["layers.0.up.weight"].placements == {"tp": S(0)}


def test_an_uneven_plain_split_of_a_parameter_is_legal():
    assert bound(Rule("embed", use="embedding"), mesh={"tp": 4}).params["embed.weight"].shape[0] % 4 == 3


@pytest.mark.parametrize(
    ("at", "name", "dim"), [("layers.0.up", "weight", 2), ("layers.0.up", "bias", -2), ("layers.0", "scale", 0)]
)
def test_a_dim_the_parameter_does_not_have_is_refused(at, name, dim):
    error = refused(Rule(at, params={name: {"tp": S(dim)}}))
    assert error.code == "dim-out-of-range"
    assert (name == "scale") == isinstance(error.legal, str)


def test_a_parameter_that_does_not_exist_names_the_nearest():
    error = refused(Rule("layers.*.up", params={"weigth": {"tp": S(0)}}))
    assert error.code == "no-such-parameter"
    assert "did you mean 'weight'" in str(error) and error.module == "layers.0.up"
    assert refused(Rule("layers.0.down", params={"bias": {"tp": R}})).code == "no-such-parameter"
    assert "buffer" in str(refused(Rule("layers.0", params={"mask": {"tp": R}})))


def fused(rows):
    return nn.Sequential(nn.Linear(4, rows))


def test_parts_are_kept_with_the_placement_and_follow_to_the_bias():
    rule = Rule("0", use="colwise", params={"weight": {"tp": S(0), "parts": [8, 4, 4]}})
    result = bound(rule, model=fused(16))
    assert [p.placements["tp"] for p in result.params.values()] == [S(0, [8, 4, 4])] * 2


def test_gate_and_up_of_hidden_three_stored_as_six_rows_are_refused_at_tp_two():
    rule = Rule("0", params={"weight": {"tp": S(0, [3, 3])}})
    error = refused(rule, model=fused(6))
    assert error.code == "parts-not-divisible"
    assert "3" in str(error) and "tp of degree 1 or 3" in str(error)
    assert bound(rule, model=fused(6), mesh={"tp": 3})
    assert bound(rule, model=fused(6), mesh={"tp": -1})
    with pytest.raises(PlanError) as error:
        bind(Plan({"tp": -1}, rules=[rule]), fused(6), degrees={"tp": 2})
    assert error.value.code == "parts-not-divisible"


def test_parts_that_do_not_sum_to_the_dim_are_refused():
    error = refused(Rule("0", params={"weight": {"tp": S(0, [8, 4])}}), model=fused(16))
    assert error.code == "bad-parts"
    assert "12" in str(error) and "16" in str(error)


def test_inputs_of_modules_go_by_name_index_or_first():
    named = [{"mask": {"tp": R}}, {1: {"tp": R}}, {"1": {"tp": R}}]
    assert [bound(Rule("layers.0", input=i)).modules["layers.0"].input for i in named] == [{"mask": {"tp": R}}] * 3
    assert bound(Rule("layers.0", input={"tp": R})).modules["layers.0"].input == {"x": {"tp": R}}
    assert refused(Rule("layers.0", input={"masks": {"tp": R}})).code == "no-such-argument"
    assert refused(Rule("layers.0", input={2: {"tp": R}})).code == "more-layouts-than-inputs"
    assert refused(Rule("layers.0", input={0: {"tp": R}, "x": {"tp": S(1)}})).code == "two-layouts"


def test_a_container_has_no_boundary_and_is_no_unit():
    assert refused(Rule("layers", output={"tp": R})).code == "no-forward"
    assert refused(fsdp={"units": "layers"}).code == "no-forward"
    assert bound(experts={"at": "layers"}).experts == ("layers",)


def test_units_of_sections_are_paths_in_model_order_each_once():
    result = bound(
        fsdp={"units": ["head", "layers.*", "layers.1"]},
        recompute={"units": "layers.[1-2]"},
        compile={"units": "layers.0"},
        context={"attention": "layers.*"},
        pipeline={"split": ["layers.2", "layers.1"]},
    )
    assert result.fsdp_units == ("layers.0", "layers.1", "layers.2", "head")
    assert result.recompute_units == ("layers.1", "layers.2")
    assert result.compile_units == ("layers.0",)
    assert result.attention == ("layers.0", "layers.1", "layers.2")
    assert result.stage_starts == ("layers.1", "layers.2")
    assert result.experts == ()
    assert bound(pipeline={"split": "auto"}).stage_starts == ()


def test_a_unit_that_matches_nothing_is_placed_in_its_list():
    with pytest.raises(PlanError) as error:
        bind(Plan.from_yaml("mesh: {tp: 2}\nfsdp: {units: [head, layer.*]}", "p.yaml"), Model())
    assert error.value.code == "no-such-module"
    assert str(error.value.where) == "p.yaml:2:22"


def test_shard_dims_go_to_parameters_by_name():
    result = bound(fsdp={"units": "layers.*", "shard_dims": {"**.up.weight": -1}})
    assert result.shard_dims == {f"layers.{i}.up.weight": 1 for i in range(3)}
    assert refused(fsdp={"units": [], "shard_dims": {"**.upp.weight": 1}}).code == "no-such-parameter"
    assert refused(fsdp={"units": [], "shard_dims": {"**.bias": 1}}).code == "dim-out-of-range"
    two = {"**.up.weight": 1, "layers.0.up.weight": 0}
    assert refused(fsdp={"units": [], "shard_dims": two}).code == "two-rules"


def test_inputs_of_the_model_go_by_the_signature_of_its_forward():
    result = bound(inputs={"0": Input((4, 9), "int64", {"dp": S(-2)})}, mesh={"dp_shard": 2})
    assert result.inputs == {"tokens": Input((4, 9), "int64", {"dp": S(0)})}
    assert refused(inputs={"token": Input()}).code == "no-such-argument"


def test_errors_of_a_file_point_at_the_placement():
    text = "mesh: {tp: 2}\nrules:\n  - {at: head, output: {tp: R}}\n  - {at: layers.0.up, params: {bias: {tp: S(1)}}}\n"
    with pytest.raises(PlanError) as error:
        bind(Plan.from_yaml(text, "p.yaml"), Model())
    assert str(error.value.where) == "p.yaml:4:43"
    text = text.replace("S(1)", "S(0)") + "  - {at: layers.*.up, use: colwise}\n"
    with pytest.raises(PlanError) as error:
        bind(Plan.from_yaml(text, "p.yaml"), Model())
    assert error.value.code == "two-rules"
    assert str(error.value.where) == "p.yaml:5:28"
    assert "p.yaml:4:43" in str(error.value)


def test_a_shorthand_that_does_not_fit_names_the_module():
    error = refused(Rule("layers.*.norm", use="colwise"))
    assert (error.code, error.module) == ("shorthand-misfit", "layers.0.norm")


def test_the_match_table_shows_what_each_rule_reached():
    table = bound(Rule("layers.*.up", use="colwise"), Rule("", output={"tp": R})).match_table()
    assert [line.split() for line in table.splitlines()] == [
        ["layers.*.up", "3", "layers.0.up", "..", "layers.2.up"],
        ["1", "(the", "model", "itself)"],
    ]
