"""Draws and judges many cases, in some processes: not in `__main__`, which a spawned process cannot import."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.fuzz.draw import case_of
from benchmarks.fuzz.log import Judged
from benchmarks.fuzz.oracle import judge
from meshplan.verify.pool import RankPool

REAL, THOROUGH = 50, 10
BATCH = 1000  # cases after which processes are replaced
Drawn = tuple[int, int]
"""Seed and number of a case."""


def one(drawn: Drawn, real: bool = False) -> tuple[Drawn, Judged | None]:
    """Draw and judge one case; None where none was drawn."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed, number = drawn
    case = case_of(seed, number)
    return drawn, case and Judged(seed, number, case.valid, judge(case, real, number % THOROUGH == 0))


def run(cases: Sequence[Drawn], jobs: int) -> Iterator[tuple[Drawn, Judged | None]]:
    """Verdicts as they come: simulated ones from `jobs` processes, then those on real ranks from this one."""
    real = [drawn for drawn in cases if drawn[1] % REAL == 0]
    rest = [drawn for drawn in cases if drawn[1] % REAL]
    console = Console(stderr=True)
    yield from track(_simulated(rest, jobs), "simulated ranks", len(rest), console=console)
    if real:
        with RankPool(4):
            yield from (one(drawn, True) for drawn in track(real, "real ranks", console=console))


def _simulated(cases: Sequence[Drawn], jobs: int) -> Iterator[tuple[Drawn, Judged | None]]:
    if jobs < 2:
        yield from map(one, cases)
        return
    for at in range(0, len(cases), BATCH):
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
            yield from workers.map(one, cases[at : at + BATCH], chunksize=8)
