"""The expert kernels compile for Hopper without spilling a register, and move rows 16 bytes a thread, to peers and from them."""

import os

import pytest

from benchmarks.experts_compile import Case, Row, launches, roofline, wrong
from benchmarks.kernel_table import compiled
from tests.benchmarks.scripts import report_of


def test_grouped_matmuls_compile_into_wgmma_and_bulk_loads_without_spills(monkeypatch):
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    report = report_of("experts_compile", "--only", "Mixtral 8x7B/tma", "--jobs", "1")
    names = ["gate, up, unit", "the same as rows arrive", "down", "d gate, d up, unit", "dx", "d weight"]
    assert [row["kernel"] for row in report["rows"]] == names
    for row in report["rows"]:
        assert row["spills"] == 0 and row["registers"] <= 255 and 0 < row["shared"] < 232_448
        assert row["wgmma"] and row["bulk_loads"] and row["global_stores"].startswith("16 B")
        assert bool(row["async_copies"]) == (row["kernel"] == "the same as rows arrive")
    assert report["faults"] == []


@pytest.mark.parametrize(("kernel", "side"), [("push to peers", "global_stores"), ("pull from peers", "global_loads")])
def test_rows_go_to_peers_and_come_from_them_16_bytes_a_thread(kernel, side):
    (launch,) = (one for name, one in launches(Case("Qwen3-30B-A3B", "move")) if name == kernel)
    counted = compiled(launch)
    assert counted.spills == 0 and getattr(counted, side).startswith("16 B x ")


def test_a_row_of_the_table_that_is_wrong_is_said():
    good = Row("push to peers", "m", "move", "32 x 512", 8, 2, 48, 0, 4, 0, 0, 0, "16 B x 4, 8 B x 6", "16 B x 4")
    assert wrong(good) == []
    for change in ({"spills": 2}, {"shared": 232_448}, {"global_stores": "2 B x 64"}, {"path": "tma"}):
        assert len(wrong(Row(**{**vars(good), **change}))) == 1


def test_the_limits_are_worked_out_from_the_sizes():
    rows = {(row["model"], row["part"]): row for row in roofline()}
    down = rows["DeepSeek-V3", "down"]
    assert down["gflop"] == pytest.approx(2 * 4096 * 8 * 2048 * 7168 / 1e9)
    assert down["mb"] == pytest.approx(2 * (4096 * 8 * (2048 + 7168) + 32 * 2048 * 7168) / 1e6)
    # 411 MB would leave a rank once per expert, 270 MB do once per rank.
    assert rows["DeepSeek-V3", "dispatch"]["link_mb"] == pytest.approx(4096 * 7 * (1 - (7 / 8) ** 8) * 2 * 7168 / 1e6)
    assert round(rows["DeepSeek-V3", "combine"]["link_mb"]) == 270
