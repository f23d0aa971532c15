"""`meshplan pattern`: which mesh axis stresses which block of a model written as a pattern."""

from __future__ import annotations

from typing import Annotated

import typer

from meshplan.cli.output import emit
from meshplan.cli.ranks import mesh_of_options


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("pattern")(pattern)


def pattern(
    model: Annotated[str, typer.Argument(help="hybrid:PATTERN, hybrid:PATTERN?size=large, or a factory of such.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel degree, with sequence parallelism.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context parallel degree.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share one copy of the experts, of the others.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel degree.")] = 1,
    dp_shard: Annotated[int, typer.Option(min=1, help="Ranks that parameters are sharded over.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences on each data rank.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of each sequence, on all cp ranks together.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """Count the blocks of a pattern (A attention, E experts, M Mamba, R recurrence), and model what each sends on each axis."""
    from meshplan.cost.pattern import pattern_stress
    from meshplan.mesh.spec import AXES
    from meshplan.models.registry import resolve_model
    from meshplan.report.pattern import PatternReport

    spec = mesh_of_options(
        {"pp": pp, "dp_shard": dp_shard, "cp": cp, "tp": tp}, ",".join(a for a in AXES if a != "dp_replicate"), None
    )
    stress = pattern_stress(resolve_model(model), spec, ep=ep, batch=batch, seq=sequence)
    emit(PatternReport(stress), as_json)
