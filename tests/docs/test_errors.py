"""Every page of docs/errors: its example raises its code and says what the page shows, or a test raises it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan as mp
from meshplan.cli.explain_error import codes, page
from meshplan.lowering.fsdp import apply_fsdp
from tests.docs.prelude import NAMES, Mlp, plan

TESTS = Path(__file__).parents[1]


def example(code: str) -> tuple[str, list[str]]:
    """The Python of a page's example, "" for none, and the lines that it shows."""
    text = page(code)
    section = text[text.index("## Example") : text.index("## Cure")]
    found = re.search(r"```python\n(.*?)```", section, re.S)
    shown = section[found.end() :] if found else section
    return found[1] if found else "", [line[4:] for line in shown.splitlines() if line.startswith("    ")]


RUNNABLE = [code for code in codes() if example(code)[0]]


@pytest.mark.parametrize("code", RUNNABLE)
def test_an_example_raises_its_code_and_says_what_its_page_shows(code, tmp_path, monkeypatch):
    source, shown = example(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mp.PlanError) as caught:
        exec(compile(source, f"docs/errors/{code}.md", "exec"), {**NAMES, "__name__": "example"})
    error = caught.value
    assert error.code == code, str(error)
    legal = error.legal if isinstance(error.legal, str) else ", ".join(error.legal or [])
    said = f"{error.message} [{error.code}]" + (f"\n  legal:  {legal}" if legal else "")
    # What depends on the version is cut short by dots.
    assert re.fullmatch(re.escape("\n".join(shown)).replace(re.escape("..."), ".*"), said)


@cache
def all_tests() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))


UNRAISED = {
    "ranks-apart": "a fault of meshplan, shown by tests/runtime/test_simulated.py",
    "no-text": "a Python without the sources of its standard library",
    "no-fixpoint": "no program is known whose layouts do not settle",
    "no-rule": "what cannot be split is gathered; no program is known that reaches it",
    "no-redistribution": "the same",
    "mixed-use": "uses that disagree are told apart; no program is known that reaches it",
    "weight-conversion": "a checkpoint whose conversion by transformers is no sum of pieces",
}
"""Codes that neither a page nor a test raises, and why."""


@pytest.mark.parametrize("code", [code for code in codes() if code not in RUNNABLE])
def test_a_page_whose_example_needs_ranks_or_files_has_its_code_raised_by_a_test(code):
    assert example(code)[1], "an example shows at least the message"
    assert code in UNRAISED or re.search(rf"""["'\[]{re.escape(code)}["'\] ]""", all_tests())


def test_what_no_test_raises_is_still_so():
    assert all(code in codes() and code not in RUNNABLE for code in UNRAISED)


def seven_rows() -> str:
    model = mp.parallelize(Mlp(), plan(mesh={"dp_shard": 2}))
    try:
        mp.shard_batch(model, {"x": torch.ones(7, 8)})
    except mp.PlanError as error:
        return error.code
    return ""


def test_a_global_batch_that_data_ranks_cannot_share_is_refused(pool):
    assert pool.run(seven_rows, world=2) == ["batch-not-divisible"] * 2


def twice() -> str:
    sections = {"mesh": {"dp_shard": 2}, "fsdp": {"units": ["up"]}}
    model = mp.parallelize(Mlp(), plan(**sections))
    try:
        apply_fsdp(model, ["up"], model.up.weight.device_mesh)
    except mp.PlanError as error:
        return error.code
    return ""


def test_fsdp_applied_twice_is_refused(pool):
    assert pool.run(twice, world=2) == ["fsdp-refused"] * 2


def test_ranks_that_do_not_exist_cannot_save(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(mp.PlanError) as caught:
            mp.save(tmp_path / "step-1", Mlp())
    finally:
        dist.destroy_process_group()
    assert caught.value.code == "no-real-ranks"
