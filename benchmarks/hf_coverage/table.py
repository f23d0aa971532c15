"""The page that says what came out: counts, one row a model type, and what those that are not exact say."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.hf_coverage.case import COMPOSITIONS, LOOSE, SOLVER_SECONDS, TIGHT
from benchmarks.hf_coverage.tiny import BATCH, SEQ, model_types

PEER = "peer"
Result = Mapping[str, Any]

INTRODUCTION = f"""# Causal language models of transformers, sharded by `auto_plan`

One tiny model of every class in `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`: few, narrow layers, one of each kind that the config's
defaults have, with heads, key heads and an odd vocabulary all of different sizes. Every parameter is random. A batch of {BATCH} x
{SEQ} tokens with unequal numbers of ignored labels goes through the model's own loss. `mp.auto_plan` derives the plan, with
nothing said about the model.

*Exact* means equal to one device, to {TIGHT:.0e} of the largest value in what is computed in float64 and to {LOOSE:.0e}
where the model casts to float32, as most do in norms, rotary tables and losses. *calls*: the value and the gradient of every
torch call, and the gradient of every parameter, on simulated ranks in one process; fsdp's own gathers are not part of it.
*ranks*: loss, gradients and collectives on processes over gloo, which decide where a model blows its own rounding up. *lifted*:
the same with the model's casts to float32 going to float64, where it is further apart than {LOOSE:.0e}. *Share* is the part of
the bytes of matrices in use that is cut over tp; *plan s* are CPU seconds of `auto_plan`, measured. The solver stops after
{SOLVER_SECONDS:.0f} s of wall time, so that shares on a busy machine are lower than they could be. *transformers* is what its own
`tp_plan="auto"` computes on two gloo ranks with the same models. *refused* carries a code of
`meshplan explain-error`.

`python -m benchmarks.hf_coverage --page docs/coverage.md` writes this page anew; it goes on where it was stopped.
"""


def page(results: Sequence[Result]) -> str:
    """Markdown of all `results`, model types in transformers' own order."""
    found = {(r["type"], r["composition"]): r for r in results}
    names = [name for name in model_types() if any(key[0] == name for key in found)]
    parts = [INTRODUCTION, _where(), _summary(found), _rows(found, names), _reasons(found, names)]
    return "\n".join(parts)


def _where() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "meshplan"))
    return (
        f"{datetime.date.today()}: {versions}, Python {platform.python_version()}, {os.cpu_count()} CPU cores "
        f"({platform.machine()}), no GPU.\n"
    )


def _summary(found: Mapping[tuple[str, str], Result]) -> str:
    heads = (
        "run",
        "built",
        "planned",
        "exact",
        "wrong",
        "refused",
        "failed",
        "gave up",
        "median share",
        "median plan s",
    )
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for composition in (*COMPOSITIONS, PEER):
        here = [r for (_, name), r in found.items() if name == composition]
        if not here:
            continue
        count = Counter(r["outcome"] for r in here)
        built = len(here) - count["not built"]
        planned = built - count["no plan"] if composition == PEER else sum(bool(r.get("planned")) for r in here)
        name = "transformers, tp2" if composition == PEER else composition
        cells = [
            name,
            len(here),
            built,
            planned,
            *(count[o] for o in heads[3:9]),
            _median(here, "share"),
            _median(here, "plan s"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    missing = len(model_types()) - max(Counter(name for _, name in found).values(), default=0)
    note = f"\n{missing} of {len(model_types())} types were not run yet.\n" if missing else ""
    return "\n".join(lines) + "\n" + note


def _median(results: Sequence[Result], key: str) -> str:
    values = [r[key] for r in results if r.get(key) is not None]
    return f"{statistics.median(values):.2f}" if values else "-"


def _rows(found: Mapping[tuple[str, str], Result], names: Sequence[str]) -> str:
    heads = "".join(f" {c} | error | checked | share | plan s |" for c in COMPOSITIONS)
    lines = [
        f"| type | class |{heads} transformers |",
        "|---|---|" + "---|---:|---|---:|---:|" * len(COMPOSITIONS) + "---|",
    ]
    for name in names:
        cells: list[str] = []
        shown = ""
        for composition in COMPOSITIONS:
            r = found.get((name, composition), {})
            shown = shown or r.get("class", "")
            error = None if r.get("gradients") is None else max(r["gradients"], r["loss"])
            cells += [
                r.get("outcome", "not run") + (f" [{r['code']}]" if "code" in r else ""),
                "-" if error is None else f"{error:.0e}", r.get("checked", "-"),
                f"{r['share']:.2f}" if "share" in r else "-", str(r.get("plan s", "-")),
            ]  # fmt: skip
        peer = found.get((name, PEER), {})
        shown = shown or peer.get("class", "")
        lines.append(f"| {name} | {shown} | " + " | ".join([*cells, peer.get("outcome", "not run")]) + " |")
    return "\n".join(lines) + "\n"


def _reasons(found: Mapping[tuple[str, str], Result], names: Sequence[str]) -> str:
    lines = ["## What those that are not exact say", ""]
    for name in names:
        for composition in (*COMPOSITIONS, PEER):
            r = found.get((name, composition), {})
            if r.get("reason") and not (composition == PEER and r["outcome"] == "not built"):
                where = "transformers" if composition == PEER else composition
                lines.append(f"- **{name}**, {where}, {r['outcome']}: {_escaped(r['reason'])}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
