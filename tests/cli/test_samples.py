"""`meshplan samples`: a batch as the command line names it, every sample placed, errors plainly."""

import json

import pytest
from typer.testing import CliRunner

from meshplan.cli.main import app
from meshplan.cli.samples import lengths_of
from meshplan.errors import PlanError


def run(*args: str):
    return CliRunner().invoke(app, ["samples", *args])


def test_a_long_sample_takes_all_ranks_and_short_ones_stay_on_one():
    # 16384 tokens a rank: 128K over 8 ranks fills a wave, the short samples make another, 8 on each rank.
    found = json.loads(run("131072,64x2048", "--cp", "8", "-m", "16384", "--json").stdout)
    assert [len(s["ranks"]) for s in found["samples"]] == [8] + [1] * 64
    assert found["waves"] == 2
    held = [sum(rank in s["ranks"] for s in found["samples"][1:]) for rank in range(8)]
    assert held == [8] * 8
    ours, naive = found["modelled"]["dynamic"], found["modelled"]["by tokens"]
    assert ours["work"] < 1.001 < naive["work"]
    assert all(way["work"] >= way["bound"] - 1e-9 for way in found["modelled"].values())


def test_the_table_has_every_way_within_100_columns():
    text = run("4096,16x512", "--cp", "4", "-m", "4096").stdout
    assert all(name in text for name in ("all ranks", "all, zigzag", "by tokens", "dynamic", "modelled"))
    assert max(map(len, text.splitlines())) <= 100


def test_what_does_not_fit_is_named():
    result = run("10,99", "--cp", "2", "-m", "16")
    assert result.exit_code == 2 and "1 (99 tokens)" in result.stderr


def test_lengths():
    assert lengths_of("7, 3x2") == [7, 2, 2, 2]
    with pytest.raises(PlanError) as caught:
        lengths_of("7,x2")
    assert caught.value.code == "bad-option"
