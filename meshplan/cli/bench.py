"""`meshplan bench PLAN --model M`: what a step takes, beside one device and torch's own parallelism."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from meshplan.cli.output import emit
from meshplan.errors import PlanError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("bench")(bench)


def bench(
    plan: Annotated[str, typer.Argument(help="A plan file, or a shipped plan's name.")],
    model: Annotated[str, typer.Option("--model", "-m", help="package.module:factory, a shipped model, or hf:PATH.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after a warm-up.")] = 10,
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", help="Spawn gloo ranks here, without torchrun.")] = None,
    seed: Annotated[int, typer.Option(help="Of parameters and batch.")] = 0,
    shrink: Annotated[bool, typer.Option(help="Time a small model of the same shape, with a small batch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time steps of MODEL under PLAN on the ranks that torchrun started, or on --nproc CPU ranks of this machine."""
    import torch.distributed as dist

    from meshplan.plan.yaml_io import load_plan
    from meshplan.report.bench import BenchReport
    from meshplan.verify.measure import Task, measure
    from meshplan.verify.pool import LocalPool

    task = Task(model, load_plan(plan), steps, seed, shrink)
    if nproc is not None:
        with LocalPool(nproc) as pool:
            found = pool.run(measure, task, world=nproc, timeout=3600.0)[0]
        emit(BenchReport(model, steps, found), as_json)
        return
    if "RANK" not in os.environ:
        raise PlanError(
            "bench runs on ranks, and nobody started any", code="no-ranks",
            legal="torchrun --nproc-per-node N -m meshplan bench ..., or --nproc N",
        )  # fmt: skip
    _join()
    try:
        found = measure(task)
        if dist.get_rank() == 0:
            emit(BenchReport(model, steps, found), as_json)
    finally:
        dist.destroy_process_group()


def _join() -> None:
    """Join torchrun's ranks: over NCCL where each rank of the node has a GPU of its own, else over gloo."""
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
