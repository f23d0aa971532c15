"""The compile cost benchmark lowers what it says it lowers; seconds are left to the benchmark."""

from tests.benchmarks.scripts import report_of


def test_three_cases_of_one_model_with_the_collectives_of_their_layers():
    report = report_of("compile_cost", "--model", "llama-tiny", "--few", "1")
    many, small, short = report["rows"]
    assert [(r["layers"], r["ranks"]) for r in report["rows"]] == [(2, 16384), (2, 8), (1, 16384)]
    # A block adds 8 collectives of tp, and 2 gathers and 1 scatter of FSDP.
    assert many["collectives"] == small["collectives"] == short["collectives"] + 11
    assert all(r["lower s"] > 0 and r["peak GiB"] > 0.1 for r in report["rows"])
    assert report["facts"]["at most 2.0 GiB"] == (many["peak GiB"] <= 2)
