"""`meshplan explain`: what a plan makes a model communicate, before any GPU runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.output import PIPE_WIDTH, emit

if TYPE_CHECKING:
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

    d = lowered_json(plan, model, world_size, as_json or verbose > 0, imbalance)
    if html is not None:
        html.write_text(html_page(d), encoding="utf-8")
    if trace is not None:
        trace.write_text(json.dumps(trace_json(d)), encoding="utf-8")
    stress = stress_of(plan, model, world_size)
    if as_json:
        typer.echo(json.dumps(d if stress is None else d | {"pattern": stress.to_dict()}, indent=2))
    elif program:
        typer.echo(program_text(d), nl=False)
    else:
        width, color = terminal()
        typer.echo(explain_text(d, verbose, width, color), nl=False)
        if stress is not None:
            typer.echo()
            emit(stress, False)


def lowered_json(
    plan: str, model: str, world_size: int, symbolic: bool = False, imbalance: float = 1.0
) -> dict[str, Any]:
    """`Lowered.to_json(symbolic, imbalance)` of a plan and a model by name; the model has no values (meta device)."""
    import torch

    import meshplan
    from meshplan.models.registry import resolve_model
    from meshplan.plan.yaml_io import load_plan

    read = load_plan(plan)
    with torch.device("meta"):
        built = resolve_model(model)()
    return meshplan.lower(built, read, world_size=world_size).to_json(symbolic, imbalance)


def terminal() -> tuple[int, bool]:
    """(width, colour) of the output: a terminal's own, `PIPE_WIDTH` and no colour elsewhere."""
    from rich.console import Console

    console = Console()
    return (console.width, not console.no_color) if console.is_terminal else (PIPE_WIDTH, False)


def stress_of(plan: str, model: str, world_size: int) -> PatternReport | None:
    """Of a model written as a pattern, which axis of the plan's mesh stresses which block; None of other models, and of plans
    without a tensor of tokens [batch, sequence]."""
    import torch

    from meshplan.cost.pattern import pattern_stress
    from meshplan.mesh.spec import DATA_AXES, MeshSpec
    from meshplan.models.hybrid import Hybrid
    from meshplan.models.registry import resolve_model
    from meshplan.plan.yaml_io import load_plan
    from meshplan.report.pattern import PatternReport

    factory, read = resolve_model(model), load_plan(plan)
    with torch.device("meta"):
        built = factory()
    shapes = [item.shape for item in read.inputs.values() if item.shape is not None and len(item.shape) == 2]
    if not isinstance(built, Hybrid) or not shapes:
        return None
    spec = MeshSpec.resolve(read.mesh, world_size)
    ranks = spec.degree(*(axis for axis in DATA_AXES if axis != "cp"))
    ep = read.experts.ep if read.experts is not None else 1
    dtype = next(built.parameters()).dtype
    return PatternReport(
        pattern_stress(lambda: built, spec, ep=ep, batch=max(1, shapes[0][0] // ranks), seq=shapes[0][1], dtype=dtype)
    )
