"""The attention kernels compile for Hopper without spilling a register, head dim 256 included."""

import os

import pytest

from benchmarks.attention_compile import roofline
from tests.benchmarks.scripts import report_of


def test_head_dim_256_compiles_into_wgmma_and_bulk_copies_without_spills(monkeypatch):
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    report = report_of("attention_compile", "--only", "256/causal/tma", "--jobs", "1")
    assert [row["kernel"] for row in report["rows"]] == ["forward", "dk", "dv", "dq"]
    for row in report["rows"]:
        assert row["spills"] == 0 and row["registers"] <= 255 and 0 < row["shared"] < 232_448
        assert row["wgmma"] and row["bulk_loads"] and row["bulk_stores"]
    assert report["faults"] == []


def test_the_limits_are_worked_out_from_the_sizes():
    rows = {(row["d"], row["mask"], row["pass"]): row for row in roofline()}
    full = rows["128", "full", "forward"]
    assert full["gflop"] == pytest.approx(4 * 2 * 32 * 4096 * 4096 * 128 / 1e9)
    # q, k and v in 2 bytes; the sums, [B, H, L, 128 + 2], read and written in 4.
    assert full["mb"] == pytest.approx((2 * 2 * 4096 * 128 * (32 + 8 + 8) + 2 * 4 * 2 * 32 * 4096 * 130) / 1e6)
    assert rows["128", "full", "backward"]["gflop"] == pytest.approx(full["gflop"] * 7 / 2)
    assert rows["256", "full", "backward"]["gflop"] == pytest.approx(rows["256", "full", "forward"]["gflop"] * 8 / 2)
