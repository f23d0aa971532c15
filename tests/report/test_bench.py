"""The bench report: numbers to JSON as they are, to the table as people read them, and what was not measured."""

import io
from dataclasses import replace

from rich.console import Console

from meshplan.report.bench import BenchReport
from meshplan.verify.measure import PEER, AxisCost, Measured, Steps

FOUND = Measured(
    mesh={"dp_shard": 2, "pp": 2},
    device="cpu, gloo, 2 cores for all ranks",
    tokens=600,
    ours=Steps(step_s=0.25, host_s=0.125, peak_bytes=3 * 2**20),
    single=Steps(step_s=0.5, host_s=0.5, peak_bytes=None),
    peer=None,
    axes=(AxisCost("dp_shard", 7, 2048, 0.0625), AxisCost("pp", 4, 512, None)),
    why_not={PEER: "no equivalent of the axis pp"},
)


def test_json_has_seconds_bytes_and_rates():
    data = BenchReport("tiny", 5, FOUND).to_dict()
    assert data["tokens_per_step"] == 600
    assert data["programs"]["meshplan"] == {
        "step_s": 0.25, "host_s": 0.125, "peak_bytes": 3 * 2**20, "tokens_per_s": 2400.0,
    }  # fmt: skip
    assert data["programs"]["one device"]["tokens_per_s"] == 1200.0
    assert data["programs"][PEER] is None
    assert data["axes"][1] == {"axis": "pp", "collectives": 4, "bytes": 512, "seconds": None}


def test_the_table_shows_each_number_and_says_what_is_missing():
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(BenchReport("tiny", 5, FOUND))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["meshplan", "250.0", "2,400", "125.0", "3.0", "MiB"] in lines
    assert ["one", "device", "500.0", "1,200", "500.0", "not", "measured"] in lines
    assert [*PEER.split(), *["not", "measured"] * 4] in lines
    assert ["dp_shard", "7", "2.0", "KiB", "62.5"] in lines
    assert ["pp", "4", "512", "B", "not", "measured"] in lines


def test_notes_label_every_number_and_repeat_refusals():
    notes = "\n".join(BenchReport("tiny", 5, FOUND).notes)
    assert "measured: medians of 5 steps" in notes
    assert "counted" in notes and "GPU: not measured" in notes
    assert f"{PEER}: no equivalent of the axis pp" in notes


def test_on_gpus_host_time_and_memory_are_the_gpus():
    notes = "\n".join(BenchReport("tiny", 5, replace(FOUND, device="H100, nccl")).notes)
    assert "allocated on the GPU" in notes and "not measured" not in notes
