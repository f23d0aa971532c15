"""`meshplan explain`: what a plan makes a model communicate, before any GPU runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.output import PIPE_WIDTH, emit

if TYPE_CHECKING:
    from torch import nn

    from meshplan.plan.plan import Plan
    from meshplan.report.pattern import PatternReport


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("explain")(explain)


def explain(
    plan: Annotated[str, typer.Argument(help="A plan file, or a shipped plan's name.")],
    model: Annotated[str, typer.Option("--model", "-m", help="package.module:factory, a shipped model, or hf:PATH.")],
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, help="Ranks of the job.")],
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Open the lines; twice for more.")] = 0,
    program: Annotated[bool, typer.Option("--program", help="Print the program of a rank as pseudo-code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained page.")] = None,
    imbalance: Annotated[
        float, typer.Option("--imbalance", min=1, help="Of experts' load, as `mp.expert_load` measures it.")
    ] = 1.0,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the order of collectives, for Perfetto.")] = None,
) -> None:
    """Lower a plan and show its collectives, forward and backward, with bytes, links and source lines."""
    from meshplan.report.html import html_page
    from meshplan.report.program import program_text
    from meshplan.report.text import explain_text
    from meshplan.report.trace import trace_json

    read, built = plan_and_model(plan, model)
    d = lowered_json(read, built, world_size, as_json or verbose > 0, imbalance)
    if html is not None:
        html.write_text(html_page(d), encoding="utf-8")
    if trace is not None:
        trace.write_text(json.dumps(trace_json(d)), encoding="utf-8")
    if as_json:
        stress = stress_of(read, built, world_size)
        typer.echo(json.dumps(d if stress is None else d | {"pattern": stress.to_dict()}, indent=2))
    elif program:
        typer.echo(program_text(d), nl=False)
    else:
        width, color = terminal()
        typer.echo(explain_text(d, verbose, width, color), nl=False)
        if (stress := stress_of(read, built, world_size)) is not None:
            typer.echo()
            emit(stress, False)


def plan_and_model(plan: str, model: str) -> tuple[Plan, nn.Module]:
    """A plan and a model by name; the model has no values (meta device)."""
    import torch

    from meshplan.models.registry import resolve_model
    from meshplan.plan.yaml_io import load_plan

    read = load_plan(plan)
    with torch.device("meta"):
        return read, resolve_model(model)()


def lowered_json(
    plan: Plan, model: nn.Module, world_size: int, symbolic: bool = False, imbalance: float = 1.0
) -> dict[str, Any]:
    """`Lowered.to_json(symbolic, imbalance)`."""
    import meshplan

    return meshplan.lower(model, plan, world_size=world_size).to_json(symbolic, imbalance)


def terminal() -> tuple[int, bool]:
    """(width, colour) of the output: a terminal's own, `PIPE_WIDTH` and no colour elsewhere."""
    from rich.console import Console

    console = Console()
    return (console.width, not console.no_color) if console.is_terminal else (PIPE_WIDTH, False)


def stress_of(plan: Plan, model: nn.Module, world_size: int) -> PatternReport | None:
    """Of a model written as a pattern, which axis of the plan's mesh stresses which block; None of other models, and of plans
    without a tensor of tokens [batch, sequence]."""
    from meshplan.cost.pattern import pattern_stress
    from meshplan.mesh.spec import DATA_AXES, MeshSpec
    from meshplan.models.hybrid import Hybrid
    from meshplan.report.pattern import PatternReport

    shapes = [item.shape for item in plan.inputs.values() if item.shape is not None and len(item.shape) == 2]
    if not isinstance(model, Hybrid) or not shapes:
        return None
    spec = MeshSpec.resolve(plan.mesh, world_size)
    ranks = spec.degree(*(axis for axis in DATA_AXES if axis != "cp"))
    ep = plan.experts.ep if plan.experts is not None else 1
    dtype = next(model.parameters()).dtype
    return PatternReport(
        pattern_stress(lambda: model, spec, ep=ep, batch=max(1, shapes[0][0] // ranks), seq=shapes[0][1], dtype=dtype)
    )
