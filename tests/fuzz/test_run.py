"""A short run of the fuzzer: nothing is wrong, and few plans that have a meaning are refused. `FUZZ_CASES=1000` runs longer."""

from __future__ import annotations

import os
import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz.__main__ import one, report
from benchmarks.fuzz.draw import case_of, draw
from benchmarks.fuzz.oracle import judge
from benchmarks.fuzz.shrink import shrink

CASES = int(os.environ.get("FUZZ_CASES", "40"))
SEED = 1


def test_every_case_is_exact_or_refused():
    found = [outcome for outcome in (one(SEED, n) for n in range(CASES)) if outcome is not None]
    wrong = [(number, v.code, v.detail) for number, _, v in found if v.kind == "wrong"]
    assert not wrong, wrong[0]
    said = report(SEED, range(CASES), found, 1.0)
    assert said.facts["percent of valid plans refused"] < 10
    assert sum(v.kind == "exact" for _, _, v in found) > 0.6 * len(found)


@settings(max_examples=5, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_what_hypothesis_draws_is_exact_or_refused(rng: random.Random):
    case = draw(rng)
    if case is not None:
        verdict = judge(case)
        assert verdict.kind != "wrong", f"{verdict.code}: {verdict.detail}\n{case.script()}"


def test_a_case_is_the_same_wherever_it_is_drawn_and_its_script_reproduces_it():
    case, again = case_of(SEED, 3), case_of(SEED, 3)
    assert case is not None and case == again
    space: dict[str, object] = {"__name__": "script"}
    exec(
        case.script().replace("print(align(", "results = dict(align=(").replace(f", {case.seed}))", f", {case.seed}))"),
        space,
    )
    model, batch = space["model"], space["batch"]
    assert isinstance(model, torch.nn.Module) and isinstance(batch, dict)
    assert all(torch.equal(batch[name], value) for name, value in case.batch().items())


def test_a_case_is_made_short_while_it_stays_what_it_is():
    cases = (case_of(SEED, n) for n in range(40))
    case = next(c for c in cases if c is not None and ".softmax(" in c.source() and len(c.source()) > 1000)
    small = shrink(case, lambda c: ".softmax(" in c.source(), tries=100)
    assert ".softmax(" in small.source() and len(small.source()) < len(case.source())
    assert not small.plan.get("rules")
    small.built()(**small.batch())
