"""`meshplan demo` from end to end, with few steps: what it prints, in which order, and what it leaves behind."""

import csv
import json

import pytest
from typer.testing import CliRunner

import meshplan.demo.run as run
from meshplan.cli.main import PLAN_ERROR, app
from meshplan.verify.receipt import Check, Receipt


@pytest.fixture(scope="module", autouse=True)
def warm_ranks(pool):
    """The demo's four ranks are the session's, which are warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "RankPool", lambda n: _Borrowed(pool))
        yield


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """(what the demo of the transformers model printed as JSON, its folder): the shorter of the two models."""
    out = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--model", "hf", "--steps", "5", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), out / "hf"


def test_the_outcome_is_a_passed_receipt_and_two_curves_that_agree(shown):
    (outcome,), _ = shown
    assert outcome["receipt"]["passed"]
    assert outcome["receipt"]["world_size"] == 4
    one, four = outcome["losses"]["one device"], outcome["losses"]["4 ranks"]
    assert len(one) == len(four) == 5
    difference = outcome["largest_difference"]
    assert difference["value"] == max(abs(a - b) for a, b in zip(one, four, strict=True)) < 1e-4
    assert abs(one[difference["step"] - 1] - four[difference["step"] - 1]) == difference["value"]
    assert one[-1] < one[0]


def test_speeds_say_that_they_were_measured(shown):
    (outcome,), _ = shown
    speeds = dict(outcome["tokens_per_second"])
    assert speeds.pop("label") == "measured"
    assert set(speeds) == {"one device", "4 ranks"}
    assert all(speed > 0 for speed in speeds.values())


def test_every_file_named_was_written_and_holds_what_it_says(shown):
    (outcome,), folder = shown
    files = {path.name for path in folder.iterdir()}
    names = {"plan.yaml", "explain.html", "lowered.json", "receipt.json", "losses.csv", "losses.png", "config.json"}
    assert files == names == {path.rpartition("/")[2] for path in outcome["files"].values()}
    assert Receipt.from_json((folder / "receipt.json").read_text()).passed
    assert len(json.loads((folder / "lowered.json").read_text())["collectives"]) == outcome["collectives"]
    rows = list(csv.reader((folder / "losses.csv").open()))
    assert rows[0] == ["step", "one device", "4 ranks"]
    assert [float(row[1]) for row in rows[1:]] == outcome["losses"]["one device"]
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_story_runs_from_ranks_over_graph_and_proof_to_curves(monkeypatch, tmp_path):
    own = run.own_llama  # of the same names, but tiny
    monkeypatch.setattr(run, "own_llama", lambda: run.Case(**{**vars(own()), "model": "llama-tiny"}))
    result = CliRunner().invoke(app, ["demo", "--model", "llama", "--steps", "5", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    chapters = ["who talks to whom", "what a training step communicates", "proof   ", "training   ", "* all of them"]
    at = [result.stdout.index(chapter) for chapter in chapters]
    assert at == sorted(at)
    assert "[0,1]  [2,3]" in result.stdout  # the tp groups
    assert "layers.[0-1]  x2" in result.stdout  # the graph
    assert "verified: llama-tiny   dp_shard 2 x tp 2 + sp" in result.stdout
    assert "5/5" in result.stdout
    assert f"wrote {tmp_path / 'llama' / 'losses.png'}" in result.stdout


def test_a_receipt_that_fails_is_the_exit_status(monkeypatch, tmp_path):
    class Failed:
        receipt = Receipt("m", "tp 2", {"tp": 2}, 2, "float64", 0, 1, {}, "cpu", {}, (Check("loss", False),), ())

    monkeypatch.setattr(run, "run_demo", lambda *a: [Failed()])
    assert CliRunner().invoke(app, ["demo", "--out", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "llamma"], "the demo has no model 'llamma' [no-such-model]"),
        (["--steps", "2"], "2 steps are too few"),
    ],
)
def test_what_the_demo_cannot_do_is_refused_before_anything_starts(options, said, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *options])
    assert result.exit_code == PLAN_ERROR
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


class _Borrowed:
    """A pool that is used and not closed."""

    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        return self.pool

    def __exit__(self, *exc):
        pass
