"""The attention kernels compile for Hopper without spilling a register, head dim 256 included."""

import os
from pathlib import Path

import pytest

from benchmarks.attention_compile import _widths, roofline, write_section
from tests.benchmarks.scripts import report_of


def test_head_dim_256_compiles_into_wgmma_and_bulk_copies_without_spills(monkeypatch):
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    report = report_of("attention_compile", "--only", "256/causal/tma", "--jobs", "1")
    assert [row["kernel"] for row in report["rows"]] == ["forward", "dk", "dv", "dq"]
    for row in report["rows"]:
        assert row["spills"] == 0 and row["registers"] <= 255 and 0 < row["shared"] < 232_448
        assert row["wgmma"] and row["bulk_loads"] and row["bulk_stores"]
    assert report["faults"] == []


def test_loads_are_counted_by_width():
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd2 + 0 ];
    cp.async.cg.shared.global [ %r31 + 0 ], [ %rd3 + 0 ], 0x10, %r7;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
    """
    assert _widths(ptx) == "16 B x 3, 2 B x 1"


def test_the_limits_are_worked_out_from_the_sizes():
    rows = {(row["d"], row["mask"], row["pass"]): row for row in roofline()}
    full = rows["128", "full", "forward"]
    assert full["gflop"] == pytest.approx(4 * 2 * 32 * 4096 * 4096 * 128 / 1e9)
    # q, k and v in 2 bytes; the sums, [B, H, L, 128 + 2], read and written in 4.
    assert full["mb"] == pytest.approx((2 * 2 * 4096 * 128 * (32 + 8 + 8) + 2 * 4 * 2 * 32 * 4096 * 130) / 1e6)
    assert rows["128", "full", "backward"]["gflop"] == pytest.approx(full["gflop"] * 7 / 2)
    assert rows["256", "full", "backward"]["gflop"] == pytest.approx(rows["256", "full", "forward"]["gflop"] * 8 / 2)


def test_a_section_of_a_page_is_replaced_and_the_others_stay(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nWords.\n")
    for title, body in (("One", "1"), ("Two", "2"), ("One", "11")):
        write_section(page, title, body)
    assert page.read_text() == "# Page\n\nWords.\n\n## One\n\n11\n\n## Two\n\n2\n"
