"""The benchmark of experts: every way computes what one device does, and each is held against the best of the others."""

from benchmarks.experts import OURS, SETTINGS, TOLERANCE, measure


def test_ways_are_right_and_compared_within_their_setting(pool):
    report = measure(pool, tokens=64, repeats=1)
    for setting in SETTINGS:
        rows = {row["way"]: row for row in report.rows if row["setting"] == setting}
        assert sum(way.startswith("ours") for way in rows) == len(OURS) - (setting == "same tokens") + 2
        assert ("plain all_to_all_single" in rows) == (setting == "own tokens")
        assert "transformers all_to_all, grouped_mm" in rows
        assert any("all_reduce" in way for way in rows) == (setting == "same tokens")
        assert all(0 <= row["error"] < TOLERANCE for row in rows.values())
        best = report.facts[f"{setting}: the best other"]
        assert not best.startswith("ours") and rows[best]["of the best other"] == 1.0
        assert max(row["tokens/s"] for way, row in rows.items() if not way.startswith("ours")) == rows[best]["tokens/s"]
