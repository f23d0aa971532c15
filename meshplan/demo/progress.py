"""A progress bar for work that runs in other processes, fed by the lines that they append to a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

POLL = 0.1
"""Seconds between two looks at the file."""


@contextmanager
def progress_bar(console: Console, title: str, steps: int, file: Path, unit: str = "loss") -> Iterator[None]:
    """Show a bar that stands at the number of lines in `file`, of `steps`, with the last line beside it.

    The file is made empty first and removed at the end. A thread reads it, so that the work in the body may block.
    """
    file.write_text("", encoding="utf-8")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeElapsedColumn(),
    )
    done = threading.Event()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, last="")

        def look() -> None:
            lines = file.read_text(encoding="utf-8").split("\n")[:-1]
            if lines:
                bar.update(task, completed=len(lines), last=f"{unit} {lines[-1]}")

        def follow() -> None:
            while not done.wait(POLL):
                look()

        thread = threading.Thread(target=follow, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            look()
            file.unlink()
