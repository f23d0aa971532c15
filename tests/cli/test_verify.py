"""`meshplan verify`: the receipt on stdout as text or JSON, and an exit status that says whether it passed."""

import json

import pytest
import typer
from typer.testing import CliRunner

import meshplan.cli.verify as command
from meshplan.cli.main import PLAN_ERROR, PlanGroup
from meshplan.verify import run
from meshplan.verify.receipt import Check, Receipt

PLAN = "mesh: {dp_shard: -1, tp: 2}\ninputs:\n  tokens: {dtype: int64, shape: [4, 16], place: {dp: S(0)}}\n"


@pytest.fixture
def app():
    app = typer.Typer(cls=PlanGroup, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    command.register(app)
    return app


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN)
    return str(file)


def _receipt(passed: bool) -> Receipt:
    return Receipt(
        "llama-tiny", "dp_shard 2 x tp 2", {"dp_shard": 2, "tp": 2}, 4, "float32", 3, 1, {}, "cpu, gloo", {},
        (Check("loss", passed, "step 0", 0.5, 1e-5),), (),
    )  # fmt: skip


@pytest.mark.parametrize("passed", [True, False])
def test_the_receipt_is_printed_and_the_exit_status_is_the_verdict(app, plan, monkeypatch, passed):
    asked = {}

    def verify(factory, plan, nproc, **options):
        asked.update(options, factory=factory, nproc=nproc, mesh=dict(plan.mesh))
        return _receipt(passed)

    monkeypatch.setattr(run, "verify", verify)
    arguments = ["verify", plan, "--model", "llama-tiny", "--nproc", "4", "--dtype", "float32", "--seed", "3"]
    text = CliRunner().invoke(app, arguments)
    data = CliRunner().invoke(app, [*arguments, "--json"])
    assert text.exit_code == data.exit_code == (0 if passed else 1)
    assert text.stdout.startswith("verified: llama-tiny" if passed else "FAILED: llama-tiny")
    assert Receipt.from_json(json.loads(data.stdout)) == _receipt(passed)
    assert (asked["factory"], asked["nproc"], asked["seed"]) == ("llama-tiny", 4, 3)
    assert asked["mesh"] == {"dp_shard": -1, "tp": 2}
    assert str(asked["dtype"]) == "torch.float32"


def test_a_dtype_without_tolerance_is_refused(app, plan):
    result = CliRunner().invoke(app, ["verify", plan, "--model", "llama-tiny", "--dtype", "int8"])
    assert result.exit_code == PLAN_ERROR
    assert "verify does not compute in 'int8' [bad-value]" in result.stderr


def test_a_mesh_that_does_not_fit_is_refused(app, plan):
    result = CliRunner().invoke(app, ["verify", plan, "--model", "llama-tiny", "--nproc", "3"])
    assert result.exit_code == PLAN_ERROR
    assert "[mesh-size]" in result.stderr
