"""What the benchmark scripts share: a world without ranks, interleaved timing, and one table a script."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshplan import compat


@dataclass(frozen=True)
class Report:
    """The answer of a script: rows of named values, and how to read them.

    Attributes:
        question: what was asked, with the sizes it was asked for.
        rows: one dict a row, with the same keys; JSON values.
        notes: what the numbers are (counted, modelled or measured) and what they do not say.
        facts: single values beside the table.
    """

    question: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    facts: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "rows": [dict(r) for r in self.rows],
            "facts": dict(self.facts),
            "notes": list(self.notes),
        }

    def __rich__(self) -> Group:
        table = Table(title=self.question, title_justify="left", box=None, header_style="bold")
        for key in self.rows[0]:
            table.add_column(key, justify="left" if isinstance(self.rows[0][key], str) else "right")
        for row in self.rows:
            table.add_row(*(_shown(v) for v in row.values()))
        facts = [Text(f"{key}: {_shown(value)}") for key, value in self.facts.items()]
        return Group(table, *facts, *(Text(note, style="dim") for note in self.notes))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,}" if isinstance(value, int) else str(value)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`, described by the script's docstring."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    return parser


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """This process as rank 0 of `size` ranks that exist only in name: collectives return at once, with no data."""
    dist.init_process_group("fake", store=compat.fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """CPU milliseconds of one subject over all rounds. `low` is the first decile: what a quiet machine would show."""

    median: float
    low: float


def interleaved(subjects: Mapping[str, Callable[[], None]], rounds: int, warmup: int = 3) -> dict[str, Timing]:
    """Time each subject once a round, in turn, so that whatever else the machine does falls on all of them alike.

    CPU time of the process is counted, not wall time: waiting for a core is not host time. Garbage is collected
    between the subjects, never inside one.
    """
    torch.set_num_threads(1)
    spent: dict[str, list[float]] = {name: [] for name in subjects}
    for run in subjects.values():
        for _ in range(warmup):
            run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in subjects.items():
                start = time.process_time()
                run()
                spent[name].append(time.process_time() - start)
            gc.collect(0)
    finally:
        gc.enable()
    return {
        name: Timing(statistics.median(times) * 1e3, sorted(times)[len(times) // 10] * 1e3)
        for name, times in spent.items()
    }
