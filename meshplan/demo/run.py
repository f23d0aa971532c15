"""The demo from beginning to end: look, prove, train on one device and on ranks, compare, and keep the evidence."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from meshplan.compiler.lowered_graph import Lowered, lower
from meshplan.demo.cases import BATCH, SEQ_LEN, WORLD, Case, hf_llama, own_llama
from meshplan.demo.progress import progress_bar
from meshplan.demo.train import WARM_UP, Trained, train_alone, train_on_rank
from meshplan.errors import PlanError
from meshplan.mesh.rankmap import RankMap, rank_map
from meshplan.mesh.spec import MeshSpec
from meshplan.models.registry import resolve_model
from meshplan.report.curves import curves_png, curves_text
from meshplan.report.html import html_page
from meshplan.verify.pool import RankPool
from meshplan.verify.receipt import Receipt
from meshplan.verify.run import verify

NAMES = ("llama", "hf")
FEWEST_STEPS = WARM_UP + 2
TIMEOUT = 1800.0
"""Seconds for one run of a demo on a loaded machine; a rank that fails ends it at once."""

ALONE, RANKS = "one device", f"{WORLD} ranks"


@dataclass(frozen=True)
class Shown:
    """What came out of one case.

    Attributes:
        case: what was trained.
        ranks: who talks to whom.
        lowered: the program of a rank.
        receipt: of the verification, in float64.
        losses: of each step by run, in float32; those of the ranks are the mean over all of them.
        tokens_per_second: measured, by run.
        files: what was written, by kind.
    """

    case: Case
    ranks: RankMap
    lowered: Lowered
    receipt: Receipt
    losses: dict[str, tuple[float, ...]]
    tokens_per_second: dict[str, float]
    files: dict[str, Path]

    @property
    def largest_difference(self) -> tuple[float, int]:
        """The largest absolute difference of the two loss curves, and the step (from 1) it is at."""
        apart = [abs(a - b) for a, b in zip(self.losses[ALONE], self.losses[RANKS], strict=True)]
        return max(apart), apart.index(max(apart)) + 1

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: what `meshplan demo --json` prints for this case."""
        difference, step = self.largest_difference
        return {
            "name": self.case.name,
            "title": self.case.title,
            "model": self.case.model,
            "plan": self.case.plan.to_dict(),
            "rank_map": self.ranks.to_dict(),
            "collectives": len(self.lowered.collectives),
            "receipt": self.receipt.to_json(),
            "losses": {name: list(values) for name, values in self.losses.items()},
            "largest_difference": {"value": difference, "step": step, "label": "measured"},
            "tokens_per_second": {**self.tokens_per_second, "label": "measured"},
            "files": {kind: str(path) for kind, path in self.files.items()},
        }


def run_demo(out: Path, names: Sequence[str], steps: int, console: Console, seed: int = 0) -> list[Shown]:
    """Show every case of `names` on `console`, and write its files into a folder of that name below `out`.

    Raises PlanError: `no-such-model` for a name that is none of `NAMES`; `bad-value` for too few steps; `bad-model` for
    `hf` without transformers; what a failing rank raises.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise PlanError(f"the demo has no model {unknown[0]!r}", code="no-such-model", legal=list(NAMES))
    if steps < FEWEST_STEPS:
        raise PlanError(f"{steps} steps are too few to time", code="bad-value", legal=f"at least {FEWEST_STEPS} steps")
    shown = []
    with RankPool(WORLD) as pool:
        for name in names:
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            case = own_llama() if name == "llama" else hf_llama(folder)
            shown.append(_show(case, folder, max(FEWEST_STEPS, round(steps * case.steps)), seed, pool, console))
    return shown


def _show(case: Case, folder: Path, steps: int, seed: int, pool: RankPool, console: Console) -> Shown:
    spec = MeshSpec.resolve(case.plan.mesh, WORLD)
    console.print(Rule(Text(case.title, style="bold"), align="left"))
    _head(console, "who talks to whom", "on GPUs of one node; here every link is gloo over loopback")
    ranks = rank_map(spec)
    console.print(ranks)

    _head(console, "what a training step communicates", "counted from the program, before anything has run")
    with torch.device("meta"):
        model = resolve_model(case.model)()
    lowered = lower(model, case.plan, WORLD)
    # The report has fitted and coloured its own lines.
    console.print(Text.from_ansi(lowered.explain(width=console.width, color=console.is_terminal)))

    _head(console, "proof", f"the same steps on one device and on {WORLD} real processes, compared")
    receipt = verify(case.model, case.plan, WORLD, seed=seed, rtol=case.rtol, timeout=TIMEOUT)
    console.print(Text(str(receipt)))

    _head(console, "training", f"{steps} steps of {BATCH} x {SEQ_LEN} bytes of Python's own sources, in float32")
    progress = folder / "progress"
    with progress_bar(console, f"{ALONE:<10}", steps, progress):
        alone: Trained = pool.run(train_alone, case, steps, seed, progress, world=1, timeout=TIMEOUT)[0]
    with progress_bar(console, f"{RANKS:<10}", steps, progress):
        every: list[Trained] = pool.run(train_on_rank, case, steps, seed, progress, timeout=TIMEOUT)
    losses = {ALONE: alone.losses, RANKS: tuple(map(fmean, zip(*(one.losses for one in every), strict=True)))}
    speed = {ALONE: alone.tokens_per_second, RANKS: min(one.tokens_per_second for one in every)}  # the slowest tells

    shown = Shown(case, ranks, lowered, receipt, losses, speed, {})
    _outcome(shown, console)
    shown.files.update(_write(shown, folder))
    for kind, path in shown.files.items():
        console.print(Text(f"wrote {path}   {kind}"), soft_wrap=True)
    if "picture" not in shown.files:
        console.print("no picture: matplotlib is not installed (pip install 'meshplan[plot]')", markup=False)
    console.print()
    return shown


def _head(console: Console, title: str, note: str) -> None:
    console.print(Text.assemble("\n", (title, "bold"), (f"   {note}", "dim")))


def _outcome(shown: Shown, console: Console) -> None:
    console.print(Text("\n" + curves_text(shown.losses, width=min(console.width, 80))))
    difference, step = shown.largest_difference
    first, last = shown.losses[ALONE][0], shown.losses[ALONE][-1]
    console.print(f"\nloss {first:.3f} -> {last:.3f}; largest difference {difference:.1e}, at step {step} (measured)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    speed = ", ".join(f"{name} {value:,.0f}" for name, value in shown.tokens_per_second.items())
    console.print(f"tokens/s {speed} (measured on {cores} CPU cores, one thread a process; no GPU was used)\n")


def _write(shown: Shown, folder: Path) -> dict[str, Path]:
    """Write the evidence; the files by kind."""
    lowered = shown.lowered.to_json()
    text = {
        "plan": ("plan.yaml", shown.case.plan.to_yaml()),
        "comm graph, as a page": ("explain.html", html_page(lowered)),
        "comm graph, as data": ("lowered.json", json.dumps(lowered, indent=1) + "\n"),
        "receipt": ("receipt.json", json.dumps(shown.receipt.to_json(), indent=1) + "\n"),
        "losses": ("losses.csv", _csv(shown.losses)),
    }
    files = {}
    for kind, (name, content) in text.items():
        files[kind] = folder / name
        files[kind].write_text(content, encoding="utf-8")
    picture = folder / "losses.png"
    if curves_png(picture, shown.losses, f"{shown.case.title}\n{shown.receipt.composition}"):
        files["picture"] = picture
    if (folder / "config.json").exists():
        files["configuration of the model"] = folder / "config.json"
    return files


def _csv(series: dict[str, tuple[float, ...]]) -> str:
    head = "step," + ",".join(series)
    rows = zip(*series.values(), strict=True)
    return "\n".join([head, *(f"{i}," + ",".join(map(repr, row)) for i, row in enumerate(rows, 1))]) + "\n"
