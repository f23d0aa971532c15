"""`meshplan ranks`: which ranks talk to each other under given degrees, and over which links."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from meshplan.cli.output import emit
from meshplan.errors import PlanError
from meshplan.mesh.expert_view import expert_view
from meshplan.mesh.rankmap import rank_map
from meshplan.mesh.spec import AXES, MeshSpec
from meshplan.mesh.topology import Topology


def ranks(
    tp: Annotated[int, typer.Option(help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel degree.")] = 1,
    dp: Annotated[int | None, typer.Option(help="Data parallel degree: the same as --dp-shard.")] = None,
    dp_replicate: Annotated[int, typer.Option(help="Replicas of the sharded parameters.")] = 1,
    dp_shard: Annotated[int | None, typer.Option(help="Ranks that parameters are sharded over.")] = None,
    cp: Annotated[int, typer.Option(help="Context parallel degree.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Ranks that share one copy of the experts.")] = None,
    etp: Annotated[int, typer.Option(help="Ranks that split each expert, with --ep.")] = 1,
    order: Annotated[str, typer.Option(help="Axes, outermost first.")] = ",".join(AXES),
    node_size: Annotated[int, typer.Option(help="Ranks a node.")] = 8,
    world_size: Annotated[int | None, typer.Option(help="Ranks in all; one degree may then be -1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """List the groups of every axis, the links they run on, and what to be warned of. With --ep also the experts' view of the
    same ranks: which of them share a copy of the experts, borrowed from which axes, and which hold further copies."""
    if dp is not None and dp_shard is not None:
        raise PlanError("--dp and --dp-shard are two names for one degree", code="bad-option", legal="one of them")
    shard = dp if dp is not None else dp_shard
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": 1 if shard is None else shard, "cp": cp, "tp": tp}
    spec = mesh_of_options(degrees, order, world_size)
    view = None if ep is None else expert_view(spec, ep, etp)
    emit(rank_map(spec, Topology(node_size=node_size), view), as_json)


def mesh_of_options(degrees: dict[str, int], order: str, world_size: int | None) -> MeshSpec:
    """The mesh of degrees given one by one; axes of degree 1 are left out.

    Arguments:
        degrees: by axis; one may be -1 if `world_size` is given.
        order: axes outermost first, separated by commas; it may leave out axes of degree 1.
        world_size: ranks in all, or None for the product of the degrees.

    Raises PlanError: `bad-order` for an order that repeats an axis, leaves out one that has ranks or names an unknown
    one; `mesh-size` and `bad-degree` as `MeshSpec.resolve`.
    """
    names = [name.strip() for name in order.split(",") if name.strip()]
    used = [name for name, degree in degrees.items() if degree != 1]
    wrong = [
        *(f"{name} is not an axis" for name in names if name not in degrees),
        *(f"{name} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1),
        *(f"{name} {degrees[name]} is left out" for name in used if name not in names),
    ]
    if wrong:
        raise PlanError(
            f"order {order!r}: {', '.join(wrong)}",
            code="bad-order",
            legal=f"each of {', '.join(degrees)} at most once, and those with more than one rank exactly once",
        )
    mesh = {name: degrees[name] for name in names if degrees[name] != 1}
    if world_size is None:
        if -1 in mesh.values():
            raise PlanError(
                "a degree of -1 is whatever is left of the world, and the world is not known",
                code="mesh-size",
                legal="--world-size, or a positive degree",
            )
        world_size = math.prod(mesh.values())
    return MeshSpec.resolve(mesh, world_size)
