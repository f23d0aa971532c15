"""`meshplan diff`: what one plan moves more than another, by axis and by module."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshplan.cli.explain import lowered_json, plan_and_model, terminal


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("diff")(diff)


def diff(
    plan_a: Annotated[str, typer.Argument(help="A plan file, or a shipped plan's name.")],
    plan_b: Annotated[str, typer.Argument(help="The plan to compare it with.")],
    model: Annotated[str, typer.Option("--model", "-m", help="package.module:factory, a shipped model, or hf:PATH.")],
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, help="Ranks of the job.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Lower two plans for one model and compare their communication a step."""
    from meshplan.report.diff import diff_json, diff_text

    a, b = (lowered_json(*plan_and_model(plan, model), world_size) for plan in (plan_a, plan_b))
    typer.echo(json.dumps(diff_json(a, b), indent=2) if as_json else diff_text(a, b, *terminal()), nl=as_json)
