"""The page that says what came out: counts, for each mesh one row a model type, and what those that are not exact say."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.hf_coverage.case import COMPOSITIONS, LOOSE, SOLVER_SECONDS, TIGHT
from benchmarks.hf_coverage.run import PEER, Case
from benchmarks.hf_coverage.tiny import BATCH, SEQ, model_types

BY_RANKS = ("ranks", "lifted")
"""What `checked` says where processes over gloo ran."""
Result = Mapping[str, Any]

INTRODUCTION = f"""# Causal language models of transformers, sharded by `auto_plan`

One tiny model of every class in `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`: few, narrow layers, one of each kind that the config's
defaults have, with heads, key heads and an odd vocabulary all of different sizes. Every parameter is random. A batch of {BATCH} x
{SEQ} tokens with unequal numbers of ignored labels goes through the model's own loss. `mp.auto_plan` derives the plan, with
nothing said about the model.

*Exact* means equal to one device, to {TIGHT:.0e} of the largest value in what is computed in float64 and to {LOOSE:.0e}
where the model casts to float32, as most do in norms, rotary tables and losses. *loss* and *gradients* are those relative
errors, the largest of any parameter's gradient; zero is equal bit for bit. *checked* says how:

- *ranks*: processes over gloo, one a rank, run a training step each. Compared with one device are the loss, every gradient and
  every parameter after the step; replicas bit for bit; and the collectives that ran with those predicted, one by one.
- *lifted*: the same with the model's casts to float32 going to float64, where it was further apart than {LOOSE:.0e}: what is left
  then is no rounding that the model blew up.
- *calls*: the value and the gradient of every torch call, and the gradient of every parameter, on simulated ranks in one process;
  fsdp's own gathers are not part of it. The two errors are then one, the largest of any call.

*share* is the part of the bytes of matrices in use that is cut over tp. *regions* is how the lowered modules run: on plain local
tensors, or as DTensors. *plan s* are CPU seconds of `auto_plan`, *total s* wall seconds of the row, both measured, with whatever
else ran on the machine. The solver stops after {SOLVER_SECONDS:.0f} s of wall time: on a busy machine shares are lower than they
could be. *transformers* is what its own `tp_plan="auto"` computes on two gloo ranks with the same models; *no plan* where it has
none. *refused* carries a code of `meshplan explain-error`.

`python -m benchmarks.hf_coverage --page docs/coverage.md` writes this page anew; it goes on where it was stopped,
so that a row may be of an earlier tree than the last one. `--ranks` runs every row over gloo; rows without it that agree on
simulated ranks say *calls*.
"""


def page(results: Sequence[Result]) -> str:
    """Markdown of all `results`, model types in transformers' own order."""
    found = {(r["type"], r["composition"]): r for r in results}
    names = [name for name in model_types() if any(key[0] == name for key in found)]
    tables = [_rows(found, names, composition) for composition in COMPOSITIONS]
    return "\n".join([INTRODUCTION, _where(), _summary(found), *tables, _reasons(found, names)])


def _where() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "meshplan"))
    return (
        f"{datetime.date.today()}: {versions}, Python {platform.python_version()}, {os.cpu_count()} CPU cores "
        f"({platform.machine()}), no GPU.\n"
    )


OUTCOMES = ("exact", "wrong", "refused", "failed", "gave up")


def _summary(found: Mapping[Case, Result]) -> str:
    heads = ("run", "built", "planned", *OUTCOMES, "by ranks", "median share", "share >= 0.9", "median plan s")
    lines = [_line(["", *heads]), _rule("l" + "r" * len(heads))]
    for composition in (*COMPOSITIONS, PEER):
        here = [r for (_, name), r in found.items() if name == composition]
        if not here:
            continue
        count = Counter(r["outcome"] for r in here)
        built = len(here) - count["not built"]
        outcomes = [count[o] for o in OUTCOMES]
        if composition == PEER:
            lines.append(_line(["transformers, tp2", len(here), built, built - count["no plan"], *outcomes, *"----"]))
            continue
        shares = [r["share"] for r in here if "share" in r]
        lines.append(
            _line([
                composition, len(here), built, sum(bool(r.get("planned")) for r in here), *outcomes,
                sum(r.get("checked") in BY_RANKS for r in here), _median(here, "share"),
                f"{sum(s >= 0.9 for s in shares)} of {len(shares)}", _median(here, "plan s"),
            ])
        )  # fmt: skip
    missing = len(model_types()) - max(Counter(name for _, name in found).values(), default=0)
    note = f"\n{missing} of {len(model_types())} types were not run yet.\n" if missing else ""
    return "\n".join(lines) + "\n" + note


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(aligned: str) -> str:
    """The line below a table's heads: one letter a column, `l` or `r`."""
    return "|" + "|".join("---:" if side == "r" else "---" for side in aligned) + "|"


def _median(results: Sequence[Result], key: str) -> str:
    values = [r[key] for r in results if r.get(key) is not None]
    return f"{statistics.median(values):.2f}" if values else "-"


def _rows(found: Mapping[Case, Result], names: Sequence[str], composition: str) -> str:
    """One mesh's table. Transformers' own column stands beside the mesh that it has a plan for."""
    beside = composition == next(iter(COMPOSITIONS))
    heads = [
        "type", "class", "built", "planned", "outcome", "loss", "gradients", "checked", "share", "regions", "plan s", "total s",
    ]  # fmt: skip
    lines = [f"## {composition}", "", _line(heads + ["transformers"] * beside), _rule("lllllrrlrlrr" + "l" * beside)]
    for name in names:
        r, peer = found.get((name, composition), {}), found.get((name, PEER), {})
        cells = [
            name, r.get("class") or peer.get("class", "-"), _yes(r, "built"), _yes(r, "planned"),
            r.get("outcome", "not run") + (f" [{r['code']}]" if "code" in r else ""), _error(r, "loss"),
            _error(r, "gradients"), r.get("checked", "-"), f"{r['share']:.2f}" if "share" in r else "-",
            r.get("regions", "-"), r.get("plan s", "-"), r.get("total s", "-"),
        ]  # fmt: skip
        lines.append(_line(cells + [peer.get("outcome", "not run")] * beside))
    return "\n".join(lines) + "\n"


def _yes(result: Result, key: str) -> str:
    return "-" if key not in result else "yes" if result[key] else "no"


def _error(result: Result, key: str) -> str:
    error = result.get(key)
    return "-" if error is None else "0" if error == 0 else f"{error:.0e}"


def _reasons(found: Mapping[Case, Result], names: Sequence[str]) -> str:
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
