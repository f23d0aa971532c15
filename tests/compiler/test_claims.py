"""One owner for each thing: later claims are refused unless they override."""

import pytest
from torch import nn

from meshplan.compiler.claims import Claim, Claims
from meshplan.errors import PlanError, Where
from meshplan.plan.names import names_of
from meshplan.plan.placements import R, S
from meshplan.plan.rules import Rule

MODEL = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
MODEL["head"].weight = MODEL["embed"].weight
NAMES = names_of(MODEL)
(WEIGHT,) = NAMES.params
HEAD = NAMES.module_by_name["head"]


def claim(placement, name, override=False):
    return Claim(placement, Rule("x", use="colwise", override=override), name, Where("p.yaml", 2, 1))


def code(call, *args):
    with pytest.raises(PlanError) as error:
        call(*args)
    return error.value.code


def only_embed():
    claims = Claims()
    claims.claim_param(WEIGHT, "embed.weight", "tp", claim(S(0), "embed.weight"))
    return claims


def test_the_same_thing_twice_is_refused_even_when_equal():
    claims = Claims()
    claims.claim_param(WEIGHT, "embed.weight", "tp", claim(S(0), "embed.weight"))
    assert code(claims.claim_param, WEIGHT, "embed.weight", "tp", claim(S(0), "embed.weight")) == "two-rules"
    claims.claim_param(WEIGHT, "embed.weight", "cp", claim(R, "embed.weight"))


def test_two_names_of_one_weight_may_agree_and_may_not_differ():
    claims = Claims()
    claims.claim_param(WEIGHT, "embed.weight", "tp", claim(S(0), "embed.weight"))
    claims.claim_param(WEIGHT, "head.weight", "tp", claim(S(0), "head.weight"))
    assert code(claims.claim_param, WEIGHT, "embed.weight", "tp", claim(S(0), "embed.weight")) == "two-rules"
    assert code(Claims.claim_param, only_embed(), WEIGHT, "head.weight", "tp", claim(S(1), "head.weight")) == (
        "tied-layouts"
    )
    claims.claim_param(WEIGHT, "head.weight", "tp", claim(S(1), "head.weight", override=True))
    assert claims.params["embed.weight"]["tp"].placement == S(1)


def test_an_override_of_every_output_leaves_none_of_the_earlier_ones():
    claims = Claims()
    claims.claim_boundary(HEAD, "output", "0", "tp", claim(R, "0"))
    claims.claim_boundary(HEAD, "output", "1", "cp", claim(R, "1"))
    assert code(claims.claim_boundary, HEAD, "output", "", "tp", claim(S(1), "")) == "two-rules"
    claims.claim_boundary(HEAD, "output", "", "tp", claim(S(1), "", override=True))
    assert claims.layouts("head", "output") == {"1": {"cp": R}, "": {"tp": S(1)}}
    claims.claim_boundary(HEAD, "output", "0", "tp", claim(R, "0", override=True))
    assert claims.layouts("head", "output")["0"] == {"tp": R}
    assert claims.layouts("head", "output")[""] == {"tp": S(1)}


def test_one_rule_may_not_say_two_things_of_one_tensor():
    claims, twice = Claims(), claim(R, "x")
    claims.claim_boundary(HEAD, "input", "x", "tp", twice)
    assert code(claims.claim_boundary, HEAD, "input", "x", "tp", twice) == "two-layouts"
    assert claims.where("head") == Where("p.yaml", 2, 1)
    assert claims.where("embed") is None
