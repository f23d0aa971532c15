"""`meshplan samples`: on how many ranks of cp each sample of a packed batch goes, and how even that is."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated

import typer

from meshplan.errors import PlanError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("samples")(samples)


def samples(
    lengths: Annotated[str, typer.Argument(help="Tokens of each sample: 131072,64x2048.")],
    cp: Annotated[int, typer.Option("--cp", min=1, help="Ranks of the cp axis.")],
    most: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Rows that a rank holds at once.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every sample's ranks and the balance as JSON.")] = False,
) -> None:
    """Spread a packed batch: long samples over many ranks, short ones whole on one, with even work and tokens (modelled)."""
    from meshplan.ops.attention.dynamic import plan_samples
    from meshplan.ops.attention.dynamic_report import balance, report, ways

    schedule = plan_samples(lengths_of(lengths), cp, most)
    if not as_json:
        typer.echo(report(schedule))
        return
    placed = [
        {"sample": p.sample, "tokens": p.length, "ranks": list(p.ranks), "wave": p.wave, "order": p.balance}
        for p in sorted(schedule.pieces, key=lambda p: p.sample)
    ]
    found = {name: asdict(balance(made)) for name, made in ways(schedule).items()}
    typer.echo(json.dumps({"samples": placed, "waves": schedule.waves, "modelled": found}, indent=2))


def lengths_of(text: str) -> list[int]:
    """`131072,64x2048` as a list of lengths. Raises PlanError `bad-option` for what is neither a number nor times x number."""
    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", item)
        if match is None:
            raise PlanError(f"{item!r} is no length of samples", code="bad-option", legal="131072,64x2048")
        found += [int(match[2])] * int(match[1] or 1)
    return found
