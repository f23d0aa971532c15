"""All cases in a few processes, each result kept in a file of JSON lines, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.hf_coverage.case import GAVE_UP, quiet, run
from benchmarks.hf_coverage.peer import run_peer
from meshplan.verify.pool import RankPool

Case = tuple[str, str]
"""A model type, and what is done with it: a composition's name, or `peer`."""


PEER = "peer"
RANKS = 4
"""Processes over gloo that a process of the runner keeps for all of its cases: starting them costs more than a case."""


def work(model_type: str, composition: str, ranks: bool) -> dict[str, Any]:
    """One case, in a process of the runner's."""
    if composition == PEER:
        return run_peer(model_type)
    if ranks:
        _pool()
    return run(model_type, composition, ranks)


@cache
def _pool() -> RankPool:
    """`mp.verify` borrows it."""
    return RankPool(RANKS)


class Cache:
    """Results by case, in a file that only grows; the last line of a case counts. What was given up is tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[Case, dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            self._keep(json.loads(line))
        self.found = {case: result for case, result in self.found.items() if result["outcome"] != GAVE_UP}

    def _keep(self, result: dict[str, Any]) -> None:
        self.found[result["type"], result["composition"]] = result

    def add(self, result: dict[str, Any]) -> None:
        self._keep(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def run_all(cases: Sequence[Case], work: Callable[[str, str], dict[str, Any]], cache: Cache, jobs: int) -> None:
    """`work(type, composition)` of every case that `cache` does not hold, `jobs` at a time. A case whose process dies is
    `failed`, and its neighbours are run again."""
    left = [case for case in cases if case not in cache.found]
    with _bar() as bar:
        task = bar.add_task("cases", total=len(cases), completed=len(cases) - len(left), last="")
        while left:
            for case, result in _batch(left[: 25 * jobs], work, jobs):  # then in new processes: memory grows
                cache.add(result)
                left.remove(case)
                bar.update(task, advance=1, last=f"{result['type']} {result['composition']}: {result['outcome']}")


def _batch(
    left: Sequence[Case], work: Callable[[str, str], dict[str, Any]], jobs: int
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Results as they come, until all are there or a process died; alone, a case whose process dies has failed."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet)
    futures: dict[Future[dict[str, Any]], Case] = {pool.submit(work, *case): case for case in left}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        alone = left[0]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=quiet) as single:
            try:
                yield alone, single.submit(work, *alone).result()
            except BrokenProcessPool:
                name, composition = alone
                yield (
                    alone,
                    {"type": name, "composition": composition, "outcome": "failed", "reason": "the process died"},
                )
    finally:
        pool.shutdown(cancel_futures=True)


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    return Progress(*columns)
