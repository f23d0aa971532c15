"""`meshplan ranks` as a user sees it: tables, data, and errors on stderr with status 2."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from meshplan.cli.main import app
from meshplan.cli.ranks import mesh_of_options
from meshplan.mesh.spec import MeshSpec

DOCUMENTED = ["ranks", "--tp", "2", "--pp", "4", "--dp", "2"]


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_the_documented_call_lists_every_group_of_every_axis():
    result = run(*DOCUMENTED)
    assert result.exit_code == 0
    first = result.stdout.splitlines()[0]
    assert first == "pp 4 x dp_shard 2 x tp 2   16 ranks, 2 nodes of 8"
    spec = MeshSpec((("pp", 4), ("dp_shard", 2), ("tp", 2)))
    for axis in ("tp", "dp_shard", "pp"):
        for group in spec.groups(axis):
            assert f"[{','.join(map(str, group))}]" in result.stdout


def test_json_says_the_same_as_data():
    said = json.loads(run(*DOCUMENTED, "--json").stdout)
    assert said["mesh"] == {"pp": 4, "dp_shard": 2, "tp": 2}
    groups = {axis["axes"][0]: axis["groups"] for axis in said["axes"]}
    assert groups["tp"][0] == [0, 1] and groups["dp_shard"][0] == [0, 2] and groups["pp"][0] == [0, 4, 8, 12]
    assert {axis["axes"][0]: axis["link"] for axis in said["axes"]} == {
        "tp": "NVLink",
        "dp_shard": "NVLink",
        "pp": "network",
    }
    assert said["warnings"] == []


def test_order_moves_axes_by_name():
    said = json.loads(run(*DOCUMENTED, "--order", "tp, pp,dp_shard", "--json").stdout)
    assert list(said["mesh"]) == ["tp", "pp", "dp_shard"]
    assert next(axis["first_group"] for axis in said["axes"] if axis["axes"] == ["tp"]) == [0, 8]


def test_node_size_decides_what_is_across_and_is_warned_of():
    result = run("ranks", "--tp", "8", "--node-size", "4")
    assert "tp 8 spans 2 nodes" in result.stdout.replace("\n", " ")
    assert "[tp-across-nodes]" in result.stdout


def test_an_open_degree_needs_the_world():
    said = json.loads(run("ranks", "--tp", "4", "--dp-shard", "-1", "--world-size", "24", "--json").stdout)
    assert said["mesh"] == {"dp_shard": 6, "tp": 4}
    result = run("ranks", "--tp", "4", "--dp-shard", "-1")
    assert result.exit_code == 2
    assert "[mesh-size]" in result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--tp", "4", "--world-size", "6"], "mesh-size"),
        (["--tp", "0"], "bad-degree"),
        (["--dp", "2", "--dp-shard", "2"], "bad-option"),
        (["--tp", "2", "--order", "pp"], "bad-order"),
        (["--order", "tp,tp"], "bad-order"),
        (["--order", "tp,ep"], "bad-order"),
        (["--tp", "2", "--node-size", "0"], "bad-degree"),
    ],
)
def test_errors_are_plain_text_on_stderr_with_status_2(args, code):
    result = run("ranks", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"[{code}]" in result.stderr and "Traceback" not in result.stderr


def test_a_big_world_stays_on_a_page():
    result = run("ranks", "--tp", "8", "--pp", "16", "--dp-replicate", "4", "--dp-shard", "8", "--cp", "4")
    lines = result.stdout.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 100


def test_axes_of_one_rank_are_left_out_of_the_mesh():
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 3, "cp": 1, "tp": 2}
    assert mesh_of_options(degrees, "dp_shard,tp", None).axes == (("dp_shard", 3), ("tp", 2))
    assert mesh_of_options(dict.fromkeys(degrees, 1), "", None).world_size == 1


def test_it_runs_as_a_module_without_colours_in_a_pipe():
    done = subprocess.run(
        [sys.executable, "-m", "meshplan", "ranks", "--tp", "16"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "[tp-across-nodes]" in done.stdout


def test_the_experts_view_of_the_same_ranks():
    """dp_shard 4 x tp 2, ep 2: the drawing in meshplan/mesh/expert_view.py."""
    result = run("ranks", "--dp-shard", "4", "--tp", "2", "--ep", "2")
    assert result.exit_code == 0
    head, *rows = result.stdout[result.stdout.index("experts: ") :].splitlines()
    assert head.strip() == "experts: expert_dp 4 x ep 2 x etp 1 (ep borrows dp_shard 2)"
    assert [line.split()[0] for line in rows[1:3]] == ["expert_dp", "ep"]
    assert "[0,1,4,5]  [2,3,6,7]" in rows[1] and "[0,2]  [1,3]  [4,6]  [5,7]" in rows[2]


def test_the_experts_view_as_data_and_its_warning():
    said = json.loads(run("ranks", "--dp-shard", "16", "--tp", "2", "--ep", "8", "--etp", "2", "--json").stdout)
    assert said["experts"]["borrowed"] == {"dp_shard": 8}
    by_axis = {axis["axis"]: axis for axis in said["experts"]["axes"]}
    assert by_axis["ep"]["groups"][0] == list(range(0, 16, 2)) and by_axis["ep"]["link"] == "network"
    assert by_axis["etp"]["size"] == 2 and by_axis["expert_dp"]["groups"][0] == [0, 16]
    assert [w["code"] for w in said["warnings"]] == ["ep-across-nodes"]


def test_a_fold_that_does_not_fit_says_which_do():
    result = run("ranks", "--dp-shard", "4", "--ep", "3")
    assert result.exit_code == 2
    assert "[expert-fold]" in result.stderr and "ep: 1, 2, 4" in result.stderr
