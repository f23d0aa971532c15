"""Inputs that a plan declares as offsets of packed documents: looked at on every rank before a step begins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.frames import argument_keys
from meshplan.compiler.lowered import Core
from meshplan.errors import Where
from meshplan.mesh.build import expand
from meshplan.ops.attention.offsets import bad_offsets, fault_of
from meshplan.plan.placements import Shard

Said = tuple[tuple[Any, ...], ...]
"""By input: its name, the length of the sequence, its values, and what is wrong with them or None."""


@dataclass(frozen=True)
class Offsets:
    """One such input.

    Attributes:
        name: of the input; of: that of the input whose sequence it cuts.
        dim: of `of`, that the sequence is; cuts: the dims of `of` that axes split, each with its ranks.
        where: the plan's line.
    """

    name: str
    of: str
    dim: int
    cuts: tuple[tuple[int, int], ...]
    where: Where | None

    def size(self, tokens: Tensor) -> int:
        """The length of the whole sequence of which a rank holds `tokens`."""
        dim = self.dim % tokens.dim()
        return tokens.shape[dim] * math.prod(ranks for cut, ranks in self.cuts if cut % tokens.dim() == dim)


def declared_offsets(core: Core) -> tuple[Offsets, ...]:
    """Those of the plan. A sequence is the dim that cp splits, else dim 1."""
    inputs, found = core.bound.inputs, []
    for name, item in inputs.items():
        if item.offsets is not None:
            place = inputs[item.offsets].place
            cuts = {axis: p.dim for axis, p in place.items() if isinstance(p, Shard)}
            ranks = tuple((dim, math.prod(map(core.spec.degree, expand((axis,))))) for axis, dim in cuts.items())
            found.append(Offsets(name, item.offsets, cuts.get("cp", 1), ranks, item.source.key_where))
    return tuple(found)


def look_at(declared: tuple[Offsets, ...], model: nn.Module, args: Any, kwargs: Any) -> Said:
    """What this rank has to say of the offsets among the arguments of a call."""
    leaves = compat.flatten((args, kwargs))[0]
    keyed = zip(argument_keys(model, args, kwargs), leaves, strict=True)
    given = {key: x for key, x in keyed if isinstance(x, Tensor)}
    said = []
    for one in declared:
        if one.name in given and one.of in given:
            size, offsets = one.size(given[one.of]), given[one.name]
            said.append((one.name, size, offsets.tolist(), fault_of(offsets, size)))
    return tuple(said)


def refuse_faults(declared: tuple[Offsets, ...], said: Said) -> None:
    """Raise PlanError `bad-offsets` for what all ranks have found wrong."""
    for name, size, _, fault in said:
        if fault is not None:
            raise bad_offsets(name, fault, size).at(next(one.where for one in declared if one.name == name))
