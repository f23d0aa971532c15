"""The progress bar follows a file that someone else writes, and does not outlive its body."""

import io
import threading

import pytest
from rich.console import Console

from meshplan.demo.progress import progress_bar


def _console() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_the_bar_ends_at_the_lines_written_with_the_last_one_beside_it(tmp_path):
    console, file = _console(), tmp_path / "progress"
    with progress_bar(console, "ranks", 4, file):
        file.write_text("2.5\n1.25\n0.125\nhalf a li")
    out = console.file.getvalue()
    assert "ranks" in out
    assert "3/4" in out
    assert "loss 0.125" in out
    assert not file.exists()


def test_lines_of_an_earlier_run_are_not_counted(tmp_path):
    console, file = _console(), tmp_path / "progress"
    file.write_text("9\n9\n9\n")
    with progress_bar(console, "ranks", 4, file):
        assert file.read_text() == ""
    assert "0/4" in console.file.getvalue()


def test_an_error_in_the_body_comes_through_and_ends_the_thread(tmp_path):
    file = tmp_path / "progress"
    with pytest.raises(KeyError, match="mine"), progress_bar(_console(), "ranks", 4, file):
        raise KeyError("mine")
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    assert not file.exists()
