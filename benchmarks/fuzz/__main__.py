"""Does any plan give a wrong number? Random models under random plans, each on simulated ranks beside one device.

    python -m benchmarks.fuzz --cases 1000 --seed 0 --jobs 2 [--start K] [--json] [--out DIR]

Prints one table of verdicts by code. A wrong case is made short and printed as a script of its own; the exit code is 1.
Every `REAL`-th case runs on real gloo ranks as well, every `THOROUGH`-th has its rules checked by value and its graph
printed.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.common import Report, arguments
from benchmarks.fuzz.draw import case_of
from benchmarks.fuzz.oracle import Verdict, judge
from benchmarks.fuzz.shrink import shrink
from meshplan.cli.output import emit
from meshplan.verify.pool import RankPool

REAL, THOROUGH = 50, 10
Outcome = tuple[int, bool, Verdict]


def one(seed: int, number: int, real: bool = False) -> Outcome | None:
    """Draw and judge one case: its number, whether its plan is valid, the verdict; None where none was drawn."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = case_of(seed, number)
    if case is None:
        return None
    return number, case.valid, judge(case, real, number % THOROUGH == 0)


def run(seed: int, numbers: range, jobs: int) -> Iterator[Outcome]:
    """Verdicts as they come: simulated ones from `jobs` processes, then those on real ranks from this one."""
    real = [n for n in numbers if n % REAL == 0]
    rest = [n for n in numbers if n % REAL]
    console = Console(stderr=True)
    if jobs > 1:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
            found = workers.map(one, [seed] * len(rest), rest, chunksize=8)
            yield from filter(None, track(found, "simulated ranks", len(rest), console=console))
    else:
        yield from filter(None, (one(seed, n) for n in track(rest, "simulated ranks", console=console)))
    if real:
        with RankPool(4):
            yield from filter(None, (one(seed, n, True) for n in track(real, "real ranks", console=console)))


def report(seed: int, numbers: range, found: list[Outcome], seconds: float) -> Report:
    """One row a verdict and code, valid plans apart from spoilt ones."""
    tally = Counter((("valid" if valid else "spoilt"), v.kind, v.code) for _, valid, v in found)
    totals = Counter("valid" if valid else "spoilt" for _, valid, _ in found)
    first = {}
    for number, valid, v in sorted(found, key=lambda o: o[0]):
        first.setdefault((("valid" if valid else "spoilt"), v.kind, v.code), number)
    order = {"wrong": 0, "exact": 1, "refused": 2, "discarded": 3}
    rows = [
        {
            "plans": p,
            "verdict": kind,
            "code": code,
            "cases": n,
            "percent": 100 * n / totals[p],
            "first case": str(first[p, kind, code]),
        }
        for (p, kind, code), n in sorted(tally.items(), key=lambda i: (i[0][0] != "valid", order[i[0][1]], -i[1]))
    ]
    strict = sum(n for (p, kind, _), n in tally.items() if p == "valid" and kind == "refused")
    return Report(
        f"{len(found)} random plans of random models, seed {seed}, cases {numbers.start} to {numbers.stop - 1}",
        rows,
        notes=[
            "measured: loss, outputs and gradients in float64, within 1e-9 of one device; refusals are before any rank runs"
        ],
        facts={
            "wrong": sum(n for (_, kind, _), n in tally.items() if kind == "wrong"),
            "percent of valid plans refused": 100 * strict / max(1, totals["valid"]),
            "on real ranks": sum(v.real for _, _, v in found),
            "seconds a case": seconds / max(1, len(found)),
            "versions": f"python {sys.version.split()[0]}, torch {torch.__version__}",
        },
    )


def tell(seed: int, outcome: Outcome, out: Path | None) -> None:
    """Print a wrong case, made short, on stderr, or into a file of `out`."""
    number, _, verdict = outcome
    case = case_of(seed, number)
    assert case is not None
    if verdict.code not in ("hang", "ranks"):
        case = shrink(case, lambda c: judge(c).code == verdict.code)
    text = f'"""Case {number} of seed {seed}: {verdict.code}\n\n{verdict.detail}\n"""\n\n{case.script()}'
    if out is None:
        print(text, file=sys.stderr)
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"case_{seed}_{number}.py").write_text(text)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for scripts of wrong cases")
    given = parser.parse_args()
    numbers, began = range(given.start, given.start + given.cases), time.perf_counter()
    found = list(run(given.seed, numbers, given.jobs))
    result = report(given.seed, numbers, found, time.perf_counter() - began)
    for outcome in found:
        if outcome[2].kind == "wrong":
            tell(given.seed, outcome, given.out)
    emit(result, given.json)
    return int(result.facts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
