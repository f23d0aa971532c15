"""Plans that go wrong in one way: what they say is refused, or means something after all; it is never a wrong number."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from benchmarks.fuzz.case import Case, Input

Plan = dict[str, Any]


def spoil(rng: random.Random, case: Case) -> Case:
    """The case with one thing about its plan gone wrong."""
    name, change = rng.choice(list(FAULTS.items()))
    plan = copy.deepcopy(case.plan)
    inputs = dict(case.inputs)
    change(rng, plan, inputs)
    return Case(case.blocks, inputs, plan, False, name, case.seed)


def _rule(rng: random.Random, plan: Plan) -> dict[str, Any]:
    rules = plan.setdefault("rules", [])
    if not rules:
        rules.append({"at": ""})
    found: dict[str, Any] = rng.choice(rules)
    return found


def missing_module(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    _rule(rng, plan)["at"] = rng.choice(("nothing", "m0.x", "m99", "layers.*", "m{0,99}"))


def missing_parameter(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    _rule(rng, plan).setdefault("params", {})["wieght"] = {"tp": "S(0)"}


def bad_dim(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    rule = _rule(rng, plan)
    params = rule.setdefault("params", {})
    params[rng.choice(list(params) or ["weight"])] = {"tp": rng.choice(("S(2)", "S(7)", "S(-3)"))}


def bad_boundary_dim(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    rule = _rule(rng, plan)
    rule["output"] = {"tp": rng.choice(("S(5)", "S(-6)", "S(3)"))}


def partial_output(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    _rule(rng, plan)["output"] = {rng.choice(("tp", "tp", "dp_shard")): "P"}


def partial_input(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    _rule(rng, plan)["input"] = {"tp": "P"}


def partial_parameter(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    rule = _rule(rng, plan)
    rule["params"] = {name: {"tp": "P"} for name in rule.get("params", {"weight": 0})}


def two_rules(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    rule = _rule(rng, plan)
    again = {
        "at": rule["at"],
        "params": {n: {"tp": rng.choice(("S(0)", "S(1)", "R"))} for n in rule.get("params", {"weight": 0})},
    }
    if rng.random() < 0.3:
        again["override"] = True
    plan["rules"].append(again)


def odd_batch(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    name = rng.choice(list(inputs))
    item = inputs[name]
    d = rng.randrange(len(item.shape))
    axis = rng.choice(list(plan["mesh"]))
    if axis != "tp" and "dp" in item.place:
        axis = "tp"
    inputs[name] = Input(item.shape, item.kind, item.limit, {**item.place, axis: f"S({d})"})


def whole_batch(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    """One input split over the data ranks and another not."""
    name = rng.choice(list(inputs))
    item = inputs[name]
    inputs[name] = Input(item.shape, item.kind, item.limit, {k: v for k, v in item.place.items() if k != "dp"})


def bad_parts(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    rule = _rule(rng, plan)
    params = rule.setdefault("params", {})
    params[rng.choice(list(params) or ["weight"])] = {
        "tp": rng.choice(("S(0, parts=[1, 1])", "S(0, parts=[3, 3])", "S(0, parts=[4, 2])", "S(1, parts=[2, 2])"))
    }


def bad_axis(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    rule = _rule(rng, plan)
    rule["params"] = {"weight": {rng.choice(("dp", "dp_shard", "ep", "tq")): "S(0)"}}


def missing_unit(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    plan[rng.choice(("fsdp", "recompute"))] = {"units": [rng.choice(("blocks.*", "m99", "m0.weight"))]}


def bad_strategy(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    plan["fsdp"] = {"strategy": rng.choice(("zero4", "hsdp", 3))}


def pipeline_axis(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    plan["mesh"] = {"pp": 2, **{k: v for k, v in plan["mesh"].items() if k != "dp_replicate"}}


def misfit_shorthand(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    _rule(rng, plan)["use"] = rng.choice(("colwise", "rowwise", "embedding", "vocab_head", "sequence"))


def left_out_input(rng: random.Random, plan: Plan, inputs: dict[str, Input]) -> None:
    _rule(rng, plan)["input"] = {rng.choice(("nothing", 1, 4, "y")): {"tp": "S(0)"}}


FAULTS: dict[str, Callable[[random.Random, Plan, dict[str, Input]], None]] = {
    f.__name__: f for f in (
        missing_module, missing_parameter, bad_dim, bad_boundary_dim, partial_output, partial_input, partial_parameter, two_rules,
        odd_batch, whole_batch, bad_parts, bad_axis, missing_unit, bad_strategy, pipeline_axis, misfit_shorthand, left_out_input,
    )
}  # fmt: skip
