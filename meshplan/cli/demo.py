"""`meshplan demo`: a small Llama trained on one device and on four real ranks, with everything there is to see."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

MODELS = ("llama", "hf")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("demo")(demo)


def demo(
    steps: Annotated[int, typer.Option(help="Training steps; the transformers model takes a third of them.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("out/demo"),
    model: Annotated[
        list[str], typer.Option("--model", "-m", help="llama (plain PyTorch) or hf (transformers); may be repeated.")
    ] = list(MODELS),  # noqa: B006 (typer copies it)
    seed: Annotated[int, typer.Option(help="Of parameters and batches.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the outcome, as JSON.")] = False,
) -> None:
    """Train a small Llama on the Python standard library's sources: dp_shard 2 x tp 2 + SP, on 4 gloo ranks.

    Prints the rank map, the communication graph, the verification receipt and both loss curves, and exits with 1 if the
    receipt did not pass. Needs no GPU and no network.
    """
    # A thread each, as the ranks have, before torch starts its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rich.console import Console

    from meshplan.cli.output import PIPE_WIDTH
    from meshplan.demo.run import run_demo

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False, quiet=as_json)
    shown = run_demo(out, model, steps, console, seed)
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in shown], indent=2))
    if not all(one.receipt.passed for one in shown):
        raise typer.Exit(1)
