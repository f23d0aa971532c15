"""A short run of the fuzzer: nothing is wrong, and few plans that have a meaning are refused. `FUZZ_CASES=1000` runs longer."""

from __future__ import annotations

import os
import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz.__main__ import report
from benchmarks.fuzz.draw import case_of, draw
from benchmarks.fuzz.log import Judged, Log
from benchmarks.fuzz.oracle import Verdict, judge
from benchmarks.fuzz.run import one, run
from benchmarks.fuzz.shrink import shrink

CASES = int(os.environ.get("FUZZ_CASES", "40"))
SEED = 1


def test_every_case_is_exact_or_refused():
    found = [judged for _, judged in (one((SEED, n)) for n in range(CASES)) if judged is not None]
    wrong = [(j.case, j.verdict.code, j.verdict.detail) for j in found if j.verdict.kind == "wrong"]
    assert not wrong, wrong[0]
    said = report(found, 1.0)
    assert said.facts["percent of valid plans refused"] < 10
    assert sum(j.verdict.kind == "exact" for j in found) > 0.6 * len(found)


def test_several_processes_give_the_verdicts_of_one():
    cases = [(SEED, n) for n in range(1, 9)]
    assert list(run(cases, 2)) == list(map(one, cases))


def test_a_log_goes_on_where_it_was_stopped_and_a_wrong_case_can_be_judged_anew(tmp_path):
    log = Log(tmp_path / "log")
    log.add(3, 8, Judged(3, 8, True, Verdict("wrong", "crash", "why")))
    log.add(3, 7, Judged(3, 7, False, Verdict("refused", "two-rules", "text", True)))
    log.add(4, 1, None)
    again = Log(tmp_path / "log")
    assert set(again.found) == {(3, 8), (3, 7), (4, 1)} and [j.case for j in again.judged()] == [7, 8]
    assert again.wrong() == [Judged(3, 8, True, Verdict("wrong", "crash", "why"))]
    again.add(3, 8, Judged(3, 8, True, Verdict("exact")))
    assert not Log(tmp_path / "log").wrong() and len(Log(tmp_path / "log").judged()) == 2


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
