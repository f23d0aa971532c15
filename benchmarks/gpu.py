"""What scripts share that measure kernels on one GPU: time, the limits of the device, and checks before anything is timed."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_table import table, write_section


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def milliseconds(run: Callable[[], Any], rounds: int = 20) -> float:
    """The median on the device's own clock, after a warm-up that compiles."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def matmul_ceiling() -> float:
    """TFLOP/s of torch's bfloat16 matmul of 8192 x 8192."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def copy_ceiling() -> float:
    """GB/s, read and written, of torch's copy of 1 GiB."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e6


@dataclass(frozen=True)
class GpuScript:
    """A script that checks kernels, times them if they are right, and writes the section "Measured" of a page.

    Attributes:
        about: its docstring. checks: rows with `right`. facts: the device and its limits. timed: rows of the table.
        page: the section, of facts, rows and how many checks; without rows, of why there are none.
    """

    about: str
    checks: Callable[[], Iterable[dict[str, Any]]]
    facts: Callable[[], str]
    timed: Callable[[], list[dict[str, Any]]]
    page: Callable[..., str]

    def main(self) -> int:
        """Exit status 1 where a kernel is wrong."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--page", type=Path, help="write the result into this page")
        parser.add_argument("--check-only", action="store_true", help="stop after the checks")
        parser.add_argument("--json", action="store_true")
        given = parser.parse_args()
        if not torch.cuda.is_available():
            why = "no CUDA device was at hand."
            print(
                json.dumps({"measured": False, "why": why}) if given.json else f"Not measured: {why} Nothing was run."
            )
            if given.page is not None:
                write_section(given.page, "Measured", self.page(why, None))
            return 0
        checked = list(self.checks())
        if not all(row["right"] for row in checked):
            print(table([row for row in checked if not row["right"]]), "Wrong: nothing was timed.", sep="\n\n")
            return 1
        print(f"{len(checked)} checks right, equal bits at every run", file=sys.stderr)
        if given.check_only:
            return 0
        facts, rows = self.facts(), self.timed()
        if given.json:
            print(json.dumps({"measured": True, "facts": facts, "checks": checked, "rows": rows}, indent=1))
        else:
            print(facts, table(rows), sep="\n\n")
        if given.page is not None:
            write_section(given.page, "Measured", self.page(facts, rows, len(checked)))
        return 0
