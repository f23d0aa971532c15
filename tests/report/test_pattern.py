"""The table of a pattern: what it says of each block, and that notes are said once."""

import io
from functools import partial

import torch
from rich.console import Console

from meshplan.cost.pattern import pattern_stress
from meshplan.mesh.spec import MeshSpec
from meshplan.models.hybrid import EXAMPLE, hybrid
from meshplan.report.pattern import PatternReport


def report(**mesh: int) -> PatternReport:
    ep = mesh.pop("ep", 1)
    spec = MeshSpec(tuple(mesh.items()))
    return PatternReport(pattern_stress(partial(hybrid, EXAMPLE), spec, ep=ep, batch=2, seq=64, dtype=torch.float32))


def text(shown: PatternReport, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(shown)
    return out.getvalue().splitlines()


def test_every_letter_has_a_row_with_its_axes():
    lines = text(report(dp_shard=2, cp=2, tp=2, ep=2))
    head = next(line for line in lines if line.startswith("block"))
    assert head.split() == ["block", "parameters", "active", "FLOPs", "tp", "cp", "ep", "dp_shard", "most"]
    rows = {line.split()[1]: line for line in lines if line[:1].isdigit() and line.split()[1] in "AEMR"}
    assert [" ".join(row.split()[:3]) for row in rows.values()] == [
        "3 A attention",
        "5 E moe",
        "3 M state_space",
        "1 R recurrent",
    ]
    # One way 2 (1/2) T H w = 2 x 64 / 2 tokens of 32 float32 numbers: 8 KiB; there and back.
    assert "16 KiB" in rows["A"] and rows["E"].split().count("-") == 2


def test_notes_are_said_once_for_all_blocks_that_they_are_true_of():
    lines = text(report(dp_shard=2, cp=2, tp=2, ep=2))
    assert max(map(len, lines)) <= 100
    lines = text(report(dp_shard=2, cp=2, tp=2, ep=2), width=200)
    assert sum("ranks are data ranks" in line for line in lines) == 1
    assert any(line.startswith("ep A M R: splits nothing") for line in lines)
    assert sum("whole sequence is gathered" in line for line in lines) == 2


def test_stages_are_printed_where_there_are_some():
    lines = text(report(pp=3))
    (stages,) = [line for line in lines if line.startswith("pp ") and "|" in line]
    assert stages.startswith("pp AEME | AEME | AEMR: the busiest stage has 1.") and stages.endswith("x the mean FLOPs")
    assert not [line for line in text(report(tp=2)) if line.startswith("pp ")]


def test_data_says_the_same():
    said = report(dp_shard=2, cp=2, pp=2, ep=2).to_dict()
    assert (said["pattern"], said["ep"], said["dtype"]) == (EXAMPLE, 2, "float32")
    assert said["mesh"] == {"dp_shard": 2, "cp": 2, "pp": 2}
    letters = {block["letter"]: block for block in said["blocks"]}
    assert [letters[x]["blocks"] for x in "AEMR"] == [3, 5, 3, 1]
    assert letters["E"]["counted"]["active"] < letters["E"]["counted"]["parameters"]
    assert letters["M"]["modelled"]["cp"]["passing"] > 0 and letters["A"]["modelled"]["cp"]["passing"] is None
    assert "".join(said["stages"]) == EXAMPLE and len(said["stages"]) == 2
