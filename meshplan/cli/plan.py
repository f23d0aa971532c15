"""`meshplan plan`: derive the plan of a model on a mesh, and write it."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from meshplan.errors import PlanError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("plan")(plan)


def plan(
    model: Annotated[str, typer.Argument(help="package.module:factory, a shipped model, or hf:PATH.")],
    mesh: Annotated[str, typer.Option("--mesh", help="Degrees, outermost first: dp_shard=2,tp=4.")],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here; else it is printed.")] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Global batch of the default inputs.")] = 8,
    length: Annotated[int, typer.Option("--sequence", "-s", min=1, help="Sequence length of the same.")] = 2048,
    given: Annotated[
        list[str] | None, typer.Option("--input", help="NAME=DTYPE[SIZES], such as pixels=float32[8,3,224,224].")
    ] = None,
    memory: Annotated[float | None, typer.Option("--memory", help="Parameter bytes a rank may hold on tp.")] = None,
    sequence: Annotated[
        bool | None, typer.Option("--sp/--no-sp", help="Cut activations along the sequence; default: where it pays.")
    ] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Ranks that share one copy of the experts.")] = None,
    etp: Annotated[int, typer.Option("--etp", min=1, help="Ranks that split each expert, with --ep.")] = 1,
    world_size: Annotated[int | None, typer.Option("--world-size", "-n", help="For a degree of -1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan and its figures as JSON.")] = False,
) -> None:  # fmt: skip
    """Derive placements that cost least, from one run of the model on tensors without data.

    `package.module:factory` is code of yours that is imported and called. Without --input, forward's required arguments and
    `labels` are int64 token ids [batch, sequence].
    """
    import torch

    from meshplan.models.registry import resolve_model
    from meshplan.search.auto import derive

    degrees = degrees_of(mesh)
    with torch.device("meta"):
        built = resolve_model(model)()
    inputs = inputs_of(built.forward, given or [], batch, length)
    found = derive(
        built, degrees, inputs, memory=memory, sequence=sequence, world_size=world_size,
        experts=None if ep is None else {"ep": ep, "etp": etp},
    )  # fmt: skip
    text = found.plan.to_yaml()
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"plan": found.plan.to_dict(), **found.figures()}, indent=2))
    elif out is not None:
        typer.echo(f"{found.plan.note}\nwritten to {out}")
    else:
        typer.echo(text, nl=False)


def degrees_of(text: str) -> dict[str, int]:
    """`dp_shard=2,tp=4` as a mesh. Raises PlanError `bad-degree` for what is not axis=number."""
    degrees: dict[str, int] = {}
    for item in text.split(","):
        axis, _, number = item.partition("=")
        if not re.fullmatch(r"-?\d+", number.strip()) or axis.strip() in degrees:
            raise PlanError(
                f"--mesh {text!r}: {item!r} is no axis with its degree", code="bad-degree", legal="dp_shard=2,tp=4"
            )
        degrees[axis.strip()] = int(number)
    return degrees


def inputs_of(forward: Any, given: list[str], batch: int, length: int) -> dict[str, Any]:
    """Example inputs on meta: those of `--input`, or token ids for what forward requires and for `labels`. A `use_cache` of
    forward is False, as in training.

    Raises PlanError `bad-value` for an `--input` that names no dtype and sizes.
    """
    import torch

    takes = inspect.signature(forward).parameters
    constants = {"use_cache": False} if "use_cache" in takes else {}
    if given:
        return {**dict(map(_tensor, given)), **constants}
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [name for name, p in takes.items() if p.default is p.empty and p.kind in plain]
    names = names or [name for name in ("input_ids", "tokens") if name in takes][:1]
    names += [name for name in ("labels",) if name in takes and name not in names]
    return {**{name: torch.empty(batch, length, dtype=torch.int64, device="meta") for name in names}, **constants}


def _tensor(text: str) -> tuple[str, Any]:
    import torch

    found = re.fullmatch(r"(?P<name>[\w.]+)=(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\]", text)
    dtype = getattr(torch, found["dtype"], None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise PlanError(
            f"--input {text!r} names no dtype and sizes", code="bad-value", legal="pixels=float32[8,3,224,224]"
        )
    sizes = [int(n) for n in found["sizes"].split(",") if n.strip()]
    return found["name"], torch.empty(sizes, dtype=dtype, device="meta")
