"""`meshplan pattern` as a user sees it: a table, data, and errors on stderr with status 2."""

import json

import pytest
import typer
from typer.testing import CliRunner

from meshplan.cli import explain
from meshplan.cli.main import app


def run(*args: str):
    return CliRunner().invoke(app, ["pattern", *args])


def test_the_table_names_pattern_mesh_and_blocks():
    result = run("hybrid:AEMR", "--tp", "2", "--dp-shard", "4", "--ep", "4", "--sequence", "64")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "AEMR   1 x 64 tokens a data rank"
    assert lines[1] == "dp_shard 4 x tp 2   expert_dp 2 x ep 4 x etp 1 (ep borrows dp_shard 4)"
    assert all(f"1 {x}" in result.stdout for x in ("A attention", "E moe", "M state_space", "R recurrent"))
    assert "counted" in result.stdout and "modelled" in result.stdout


def test_json_has_every_axis_of_more_than_one_rank():
    said = json.loads(run("hybrid-tiny", "--cp", "2", "--pp", "2", "--batch", "3", "--sequence", "64", "--json").stdout)
    assert said["pattern"] == "AEMEAEMEAEMR" and (said["batch"], said["seq"]) == (3, 64)
    assert set(said["blocks"][0]["modelled"]) == {"cp", "dp_shard", "pp"}  # parameters are sharded over dp_shard x cp


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["hybrid:AEX"], "letter 3 of pattern 'AEX'"),
        (["llama-tiny"], "a Llama has no pattern"),
        (["hybrid:AE", "--ep", "2"], "expert-fold"),
        (["hybrid:AE", "--cp", "5"], "bad-value"),
    ],
)
def test_what_cannot_be_is_refused(args, words):
    result = run(*args)
    assert result.exit_code == 2 and words in result.stderr


def test_explain_tells_which_axis_stresses_which_block_of_a_pattern(tmp_path):
    plan = tmp_path / "plan.yaml"
    tokens = "{dtype: int64, shape: [8, 32], place: {dp: S(0)}}"
    plan.write_text(
        "mesh: {dp_shard: -1}\n"
        f"inputs: {{tokens: {tokens}, labels: {tokens}}}\n"
        'experts: {at: ["layers.*"], ep: 2}\n'
    )
    app = typer.Typer()
    explain.register(app)
    app.command("none")(lambda: None)
    asked = ["explain", str(plan), "--model", "hybrid:AEMR", "-n", "4"]
    said = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["pattern"]
    assert {block["letter"]: block["most"] for block in said["blocks"]} == {
        "A": "dp_shard", "E": "ep", "M": "dp_shard", "R": "dp_shard"
    }  # fmt: skip
    assert (said["ep"], said["batch"], said["seq"]) == (2, 2, 32)
    text = CliRunner().invoke(app, asked).stdout
    assert "AEMR   2 x 32 tokens a data rank" in text and "ep A M R: splits nothing" in text
