"""`meshplan explain` and `meshplan diff`: what they ask for and what they print."""

from __future__ import annotations

import json

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

import meshplan
from meshplan.cli import diff, explain
from meshplan.report.diff import diff_json, diff_text
from meshplan.report.text import explain_text
from tests.report.example import llama


class Lowered:
    """Stands in for the compiler: the example, with one layer for each rank asked for."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        assert {p.device.type for p in model.parameters()} == {"meta"}
        self.layers = world_size

    def to_json(self, symbolic: bool = False, imbalance: float = 1.0):
        d = llama(self.layers)
        return d if symbolic else {**d, "counts": {}}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(*arguments)` of an application with the two commands; `tiny.yaml` is a plan."""
    monkeypatch.setattr(meshplan, "lower", lambda model, plan, world_size: Lowered(model, world_size), raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text("mesh: {tp: 2}\n")
    app = typer.Typer()
    explain.register(app)
    diff.register(app)

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--model", "torch.nn:Flatten"])
        if result.exception:
            raise result.exception
        return result.output

    monkeypatch.setattr("meshplan.models.registry.resolve_model", lambda name: lambda: nn.Linear(2, 2))
    return call


def test_explain_prints_the_table_and_opens_it(run):
    assert run("explain", "tiny.yaml", "--world-size", "3") == explain_text(llama(3))
    assert run("explain", "tiny.yaml", "-n", "3", "-vv") == explain_text(llama(3), verbose=2)


def test_explain_as_json_program_page_and_trace(run, tmp_path):
    assert json.loads(run("explain", "tiny.yaml", "-n", "2", "--json")) == llama(2)
    text = run("explain", "tiny.yaml", "-n", "2", "--program", "--html", "a.html", "--trace", "a.json")
    assert "x = all_gather(x, tp)" in text
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert len(json.loads((tmp_path / "a.json").read_text())["traceEvents"]) == 27 + 3


def test_diff_compares_two_plans(run):
    assert run("diff", "tiny.yaml", "tiny.yaml", "-n", "2") == diff_text(llama(2), llama(2))
    assert json.loads(run("diff", "tiny.yaml", "tiny.yaml", "-n", "2", "--json")) == diff_json(llama(2), llama(2))
