"""The plan's inputs against the model's signature and the degrees of the mesh."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from meshplan.compiler.signature import Arguments
from meshplan.errors import PlanError
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.plan.rules import Input
from meshplan.plan.sections import sequence_pieces

DATA_AXES = ("dp_replicate", "dp_shard")
"""What `dp` stands for in the `place` of an input."""


def bind_inputs(
    plan: Plan, arguments: Arguments, known: Mapping[str, int], given: Collection[str] = ()
) -> dict[str, Input]:
    """The plan's inputs with dims counted from the front where the shape is known.

    Arguments:
        known: degree by axis, without those that are not resolved yet.
        given: argument names that come from elsewhere.

    Raises PlanError: `no-such-argument`, `more-layouts-than-inputs`, `missing-input` when the plan names inputs and
    leaves out one that forward needs, `dim-out-of-range`, `input-not-divisible`, `no-such-input` for offsets of none.
    """
    out: dict[str, Input] = {}
    for name, item in plan.inputs.items():
        target = arguments.resolve(name, where=item.source.key_where, module="")
        if target in out:
            raise PlanError(
                f"input {target!r} is declared twice, also as {name!r}",
                code="two-layouts",
                where=item.source.key_where,
                legal="one entry for each input",
            )
        out[target] = _checked(target, item, plan, known)
    for target, item in out.items():
        if item.offsets is not None:
            out[target] = replace(item, offsets=_cut_by(target, item, arguments, out))
    covered = {name.partition(".")[0] for name in out} | set(given)
    for name in given:
        arguments.resolve(name, where=None, module="")
    missing = [name for name in arguments.required if name not in covered]
    if (out or given) and missing:
        raise PlanError(
            f"forward needs {', '.join(map(repr, missing))}, which the plan's inputs leave out",
            code="missing-input",
            where=plan.source.child("inputs").key_where,
            module="",
            legal=list(arguments.names),
        )
    return out


def _cut_by(name: str, item: Input, arguments: Arguments, inputs: Mapping[str, Input]) -> str:
    """The input whose sequence `item` holds the offsets of."""
    of = arguments.resolve(item.offsets or "", where=item.source.child("offsets").where, module="")
    if of not in inputs or of == name:
        raise PlanError(
            f"{name!r} holds offsets of {of!r}, which is no other input of the plan", code="no-such-input",
            where=item.source.child("offsets").where, legal=[other for other in inputs if other != name],
        )  # fmt: skip
    return of


def _checked(name: str, item: Input, plan: Plan, known: Mapping[str, int]) -> Input:
    if item.shape is None:
        return item
    place = dict(item.place)
    cuts: dict[int, int] = {}
    owners: dict[int, list[str]] = {}
    for axis, placement in item.place.items():
        if not isinstance(placement, Shard):
            continue
        where = item.source.child("place", axis).where
        dims = len(item.shape)
        if not -dims <= placement.dim < dims:
            raise PlanError(
                f"input {name!r} has shape {list(item.shape)}, and no dim {placement.dim} to shard on {axis}",
                code="dim-out-of-range",
                where=where,
                legal=[f"S({dim})" for dim in range(dims)] or "R: a single number cannot be split",
            )
        dim = placement.dim % dims
        place[axis] = replace(placement, dim=dim)
        pieces = _pieces(axis, plan, known)
        cuts[dim] = cuts.get(dim, 1) * pieces
        owners.setdefault(dim, []).append(f"{axis} {pieces}")
        if item.shape[dim] % cuts[dim]:
            raise PlanError(
                f"dim {dim} of input {name!r} has size {item.shape[dim]}, not divided by {' x '.join(owners[dim])}",
                code="input-not-divisible",
                where=where,
                legal=f"a multiple of {cuts[dim]}",
            )
    return replace(item, place=place)


def _pieces(axis: str, plan: Plan, known: Mapping[str, int]) -> int:
    """Equal pieces that `axis` cuts a dim into, as far as degrees are known (1 for an unknown one)."""
    ranks = math.prod(known.get(one, 1) for one in (DATA_AXES if axis == "dp" else (axis,)))
    return sequence_pieces(axis, ranks, plan.context)
