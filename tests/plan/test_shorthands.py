"""Each shorthand, written out against modules whose weights lie one way and the other."""

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.placements import R, S
from meshplan.plan.rules import Rule
from meshplan.plan.shorthands import expand


class Transposed(nn.Module):
    """A projection with weight [in, out], as GPT-2 stores it."""

    def __init__(self, nx, nf):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))


class Bare(nn.Module):
    """A projection that does not say which side is which."""

    def __init__(self, *shape, bias=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))


def tp(**placements):
    return {name: {"tp": placement} for name, placement in placements.items()}


@pytest.mark.parametrize(
    ("use", "module", "params", "given", "returned"),
    [
        ("colwise", nn.Linear(4, 6), tp(weight=S(0), bias=S(0)), R, None),
        ("colwise", nn.Linear(4, 6, bias=False), tp(weight=S(0)), R, None),
        ("colwise", nn.Linear(4, 4), tp(weight=S(0), bias=S(0)), R, None),
        ("colwise", Transposed(4, 6), tp(weight=S(1), bias=S(0)), R, None),
        ("colwise", Transposed(4, 4), tp(weight=S(1), bias=S(0)), R, None),
        ("colwise", Bare(4, 6, bias=6), tp(weight=S(1), bias=S(0)), R, None),
        ("colwise", nn.Embedding(9, 4), tp(weight=S(1)), R, None),
        ("vocab_head", nn.Linear(4, 9, bias=False), tp(weight=S(0)), R, S(-1)),
        ("rowwise", nn.Linear(4, 6), tp(weight=S(1), bias=R), S(-1), R),
        ("rowwise", nn.Linear(4, 6, bias=False), tp(weight=S(1)), S(-1), R),
        ("rowwise", Transposed(4, 6), tp(weight=S(0), bias=R), S(-1), R),
        ("embedding", nn.Embedding(9, 4), tp(weight=S(0)), None, R),
        ("sequence", nn.LayerNorm(4), tp(weight=R, bias=R), S(1), S(1)),
        ("sequence", nn.Dropout(0.1), {}, S(1), S(1)),
        ("sequence", nn.Sequential(nn.RMSNorm(4), nn.Identity()), {"0.weight": {"tp": R}}, S(1), S(1)),
    ],
)
def test_a_shorthand_stands_for_exactly_this(use, module, params, given, returned):
    rule = expand(Rule("x", use=use), module)
    assert rule.use is None
    assert rule.params == params
    assert rule.input == ({} if given is None else {"": {"tp": given}})
    assert rule.output == ({} if returned is None else {"": {"tp": returned}})


def test_what_the_rule_says_comes_before_what_the_shorthand_says():
    rule = Rule("x", use="rowwise", params={"bias": {"tp": S(0)}}, output={"tp": S(1)}, input={"cp": S(1)})
    explicit = expand(rule, nn.Linear(4, 6))
    assert explicit.params == tp(weight=S(1), bias=S(0))
    assert explicit.output == {"": {"tp": S(1)}}
    assert explicit.input == {"": {"cp": S(1), "tp": S(-1)}}


def test_named_layouts_on_tp_replace_the_shorthands_and_others_stand_beside_it():
    said = expand(Rule("x", use="rowwise", output={0: {"tp": S(1)}}), nn.Linear(4, 6))
    assert said.output == {"0": {"tp": S(1)}}
    beside = expand(Rule("x", use="rowwise", input={"mask": {"cp": S(1)}}), nn.Linear(4, 6))
    assert beside.input == {"mask": {"cp": S(1)}, "0": {"tp": S(-1)}}


def test_the_bias_of_a_fused_projection_goes_part_by_part_with_its_weight():
    rule = Rule("x", use="colwise", params={"weight": {"tp": S(0), "parts": [8, 4, 4]}})
    assert expand(rule, nn.Linear(4, 16)).params == tp(weight=S(0, [8, 4, 4]), bias=S(0, [8, 4, 4]))


def test_a_rule_without_a_shorthand_is_itself():
    rule = Rule("x", output={"tp": R})
    assert expand(rule, nn.Linear(4, 6)) is rule


@pytest.mark.parametrize(
    ("use", "module", "code"),
    [
        ("colwise", nn.LayerNorm(4), "shorthand-misfit"),
        ("colwise", nn.Conv1d(4, 6, 3), "shorthand-misfit"),
        ("colwise", nn.Sequential(nn.Linear(4, 6)), "shorthand-misfit"),
        ("rowwise", nn.Embedding(9, 4), "shorthand-misfit"),
        ("embedding", nn.Linear(4, 6), "shorthand-misfit"),
        ("embedding", Transposed(4, 6), "shorthand-misfit"),
        ("colwise", Bare(4, 6), "shorthand-unclear"),
        ("colwise", Bare(4, 4, bias=4), "shorthand-unclear"),
        ("rowwise", Bare(4, 6, bias=5), "shorthand-unclear"),
    ],
)
def test_a_module_the_shorthand_does_not_fit_is_refused_with_a_way_out(use, module, code):
    with pytest.raises(PlanError) as error:
        expand(Rule("x", use=use), module)
    assert error.value.code == code
    assert error.value.legal
    assert error.value.where.file == __file__


def test_a_weight_that_an_adapter_took_away_is_named():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer, self.lora_A = nn.Linear(4, 6), nn.Linear(4, 2)

    with pytest.raises(PlanError, match=r"base_layer\.weight") as error:
        expand(Rule("up", use="colwise"), Adapted())
    assert error.value.code == "adapter-moved"
    assert "'up.base_layer'" in error.value.legal
