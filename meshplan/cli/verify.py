"""`meshplan verify PLAN --model M --nproc N`: prove a plan on this machine before any GPU runs it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshplan.errors import PlanError

DTYPES = ("float64", "float32")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("verify")(verify_command)


def verify_command(
    plan: Annotated[str, typer.Argument(help="A plan file, or a shipped plan's name.")],
    model: Annotated[str, typer.Option("--model", "-m", help="package.module:factory, a shipped model, or hf:PATH.")],
    nproc: Annotated[int, typer.Option("--nproc", "-n", help="Ranks, as processes on this machine.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2,
    seed: Annotated[int, typer.Option(help="Of parameters, batch and dropout.")] = 0,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    rtol: Annotated[float | None, typer.Option(help="Largest relative error that passes; default by dtype.")] = None,
    shrink: Annotated[bool, typer.Option(help="Verify a small model of the same shape, with a small batch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Run PLAN on real gloo ranks and compare loss, gradients, parameters, replicas and collectives with one device.

    Exits with 0 if everything agrees, 1 if something does not.
    """
    import torch  # seconds to import, which --help need not wait for

    from meshplan.plan.yaml_io import load_plan
    from meshplan.verify.run import verify

    if dtype not in DTYPES:
        raise PlanError(f"verify does not compute in {dtype!r}", code="bad-value", legal=list(DTYPES))
    receipt = verify(
        model,
        load_plan(plan),
        nproc,
        steps=steps,
        seed=seed,
        dtype=getattr(torch, dtype),
        rtol=rtol,
        shrink=shrink,
        model_name=model,
    )
    typer.echo(json.dumps(receipt.to_json(), indent=2) if as_json else str(receipt))
    if not receipt.passed:
        raise typer.Exit(1)
