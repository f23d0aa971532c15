"""Does any plan give a wrong number? Random models under random plans, each on simulated ranks beside one device.

    python -m benchmarks.fuzz --cases 1000 --seed 0 --jobs 2 [--start K] [--log FILE [--again]] [--json] [--out DIR]

Prints one table of verdicts by code. A wrong case is made short and printed as a script of its own; the exit code is 1.
Every `REAL`-th case runs on real gloo ranks as well, every `THOROUGH`-th has its rules checked by value and its graph
printed. With `--log` a run that was stopped goes on, and the table counts everything in the file, of all its seeds;
`--again` judges anew what was wrong there, and draws nothing else.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Report, arguments
from benchmarks.fuzz.draw import case_of
from benchmarks.fuzz.log import Judged, Log
from benchmarks.fuzz.oracle import judge
from benchmarks.fuzz.run import run
from benchmarks.fuzz.shrink import shrink
from meshplan.cli.output import emit


def report(found: Sequence[Judged], seconds: float) -> Report:
    """One row a verdict and code, valid plans apart from spoilt ones."""
    tally = Counter((_plans(j), j.verdict.kind, j.verdict.code) for j in found)
    totals = Counter(map(_plans, found))
    first: dict[tuple[str, str, str], Judged] = {}
    for j in found:
        first.setdefault((_plans(j), j.verdict.kind, j.verdict.code), j)
    order = {"wrong": 0, "exact": 1, "refused": 2, "discarded": 3}
    rows = [
        {
            "plans": p,
            "verdict": kind,
            "code": code,
            "cases": n,
            "percent": 100 * n / totals[p],
            "first (seed/case)": f"{first[p, kind, code].seed}/{first[p, kind, code].case}",
        }
        for (p, kind, code), n in sorted(tally.items(), key=lambda i: (i[0][0] != "valid", order[i[0][1]], -i[1]))
    ]
    strict = sum(n for (p, kind, _), n in tally.items() if p == "valid" and kind == "refused")
    numbers: dict[int, list[int]] = {}
    for j in found:
        numbers.setdefault(j.seed, []).append(j.case)
    drawn = "; ".join(f"seed {seed}, cases {min(all_)} to {max(all_)}" for seed, all_ in numbers.items())
    return Report(
        f"{len(found)} random plans of random models",
        rows,
        notes=[
            drawn,
            "measured: loss, outputs and gradients in float64, within 1e-9 of one device; refusals are before any rank runs",
        ],
        facts={
            "wrong": sum(n for (_, kind, _), n in tally.items() if kind == "wrong"),
            "percent of valid plans refused": 100 * strict / max(1, totals["valid"]),
            "on real ranks": sum(j.verdict.real for j in found),
            "seconds": seconds,
            "versions": f"python {sys.version.split()[0]}, torch {torch.__version__}",
        },
    )


def _plans(judged: Judged) -> str:
    return "valid" if judged.valid else "spoilt"


def tell(judged: Judged, out: Path | None) -> None:
    """Print a wrong case, made short, on stderr, or into a file of `out`."""
    verdict, case = judged.verdict, case_of(judged.seed, judged.case)
    assert case is not None
    if verdict.code not in ("hang", "ranks"):
        case = shrink(case, lambda c: judge(c).code == verdict.code)
    text = (
        f'"""Case {judged.case} of seed {judged.seed}: {verdict.code}\n\n{verdict.detail}\n"""\n\n{case.script()}'
    )
    if out is None:
        print(text, file=sys.stderr)
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"case_{judged.seed}_{judged.case}.py").write_text(text)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file of verdicts, which a later run goes on from")
    parser.add_argument("--again", action="store_true", help="judge anew what is wrong in the log, and nothing else")
    parser.add_argument("--out", type=Path, help="folder for scripts of wrong cases")
    given = parser.parse_args()
    log, began = Log(given.log), time.perf_counter()
    wanted = [(given.seed, number) for number in range(given.start, given.start + given.cases)]
    left = [drawn for drawn in wanted if drawn not in log.found]
    if given.again:
        left = [(j.seed, j.case) for j in log.wrong()]
    for drawn, judged in run(left, given.jobs):
        log.add(*drawn, judged)
    result = report(log.judged(), time.perf_counter() - began)
    for judged in log.wrong():
        tell(judged, given.out)
    emit(result, given.json)
    return int(result.facts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
