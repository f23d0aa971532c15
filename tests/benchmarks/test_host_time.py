"""The host time benchmark compares like with like; how fast anything is, no test can say."""

import pytest

from tests.benchmarks.scripts import report_of


def test_it_times_every_program_and_counts_the_collectives_of_a_block():
    report = report_of("host_time", "--layers", "2", "--rounds", "3", "--seq", "8", "--batch", "2", "--qk-norm")
    times = {row["program"].strip(): row for row in report["rows"]}
    assert list(times) == [
        "one device", "a rank's matrices, no communication", "its collectives, bare", "meshplan", "parallelize_module",
    ]  # fmt: skip
    assert all(0 < row["low ms"] <= row["ms"] for row in times.values())
    facts = report["facts"]
    # Two gathers and two scatters a block, forward and backward, and one bucket of norm gradients.
    assert facts["collectives"] == 2 * (4 + 4) + 1
    ratio = times["meshplan"]["ms"] / times["one device"]["ms"]
    assert facts["meshplan / one device"] == pytest.approx(ratio)
    assert facts["at most 1.8x one device"] == (ratio <= 1.8)
