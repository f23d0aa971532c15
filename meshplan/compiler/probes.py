"""Lowering one plan again at other batches, sequences and degrees, to see how its collectives follow them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from meshplan import compat
from meshplan.compiler.commgraph import Collective, collectives
from meshplan.compiler.compile import compile_core
from meshplan.compiler.examples import Example, Leaf
from meshplan.compiler.fitting import Key, Point, key_of
from meshplan.compiler.lowered import Core
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard

BATCH, SEQUENCE = "b", "s"


@dataclass(frozen=True)
class Probe:
    """What a lowering at one point gave: elements by collective id, in program order, and its core."""

    elements: dict[str, int]
    core: Core


def ids(sent: Iterable[Collective]) -> list[str]:
    """A name for each collective of a step: whose it is and what it does, numbered where that repeats."""
    seen: Counter[str] = Counter()
    out = []
    for c in sent:
        # "9 parameters" is what is packed now; how many they are is not who they are.
        tensor = c.tensor.rpartition(" ")[2] or c.what
        name = f"{c.module or '(model)'}.{tensor} {c.phase} {c.op} {c.axis}"
        seen[name] += 1
        out.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return out


def roles(examples: Mapping[str, Example]) -> dict[str, tuple[str | None, ...]]:
    """For each tensor input, by key: which of its dims are the batch and which the sequence.

    The batch is dim 0 of the first input, the sequence is dim 1 of it where it has two or three dims. In every input
    dim 0 of the batch's size is the batch; of the others, those of the sequence's size are the sequence.
    """
    shapes = [leaf for e in examples.values() for leaf in e.leaves if leaf.shape]
    if not shapes or not shapes[0].shape:
        return {}
    first = shapes[0].shape
    batch, seq = first[0], first[1] if len(first) in (2, 3) else None
    return {leaf.key: _roles(leaf, batch, seq) for leaf in shapes}


def _roles(leaf: Leaf, batch: int, seq: int | None) -> tuple[str | None, ...]:
    shape = leaf.shape or ()
    found: list[str | None] = [None] * len(shape)
    placed = any(isinstance(kind, Shard) and kind.dim == 0 for kind in leaf.kinds)
    if shape[0] == batch and (len(shape) > 1 or placed or batch != seq):
        found[0] = BATCH
    elif len(shape) == 1 and shape[0] == seq:
        found[0] = SEQUENCE
    for d in (1,) if len(shape) < 4 else range(2, len(shape)):
        if d < len(shape) and shape[d] == seq:
            found[d] = SEQUENCE
    return tuple(found)


@dataclass
class Prober:
    """Lowers the program of rank 0 at points over `b`, `s` and the axes of more than one rank. Results are kept."""

    model: nn.Module
    core: Core
    known: dict[Key, Probe | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roles = roles(self.core.examples)

    @property
    def axes(self) -> list[str]:
        return [name for name, n in self.core.spec.uncut.items() if n > 1]

    def here(self) -> dict[str, int]:
        """The point that the plan itself is at."""
        out: dict[str, int] = {}
        for e in self.core.examples.values():
            for leaf in e.leaves:
                for size, role in zip(leaf.shape or (), self.roles.get(leaf.key, ()), strict=False):
                    if role is not None:
                        out.setdefault(role, size)
        return out | {a: self.core.spec.degree(a) for a in self.axes}

    def at(self, point: Point) -> Probe | None:
        """The program at `point`, or None where the plan is refused there."""
        key = key_of(point)
        if key not in self.known:
            self.known[key] = self._lower(point)
        return self.known[key]

    def _lower(self, point: Point) -> Probe | None:
        if dict(point) == self.here():
            core = self.core
        else:
            plan = self.core.bound.plan
            mesh = {name: point.get(name, n) for name, n in self.core.spec.uncut.items()}
            try:
                # Shapes come as examples, so the plan's own must not be checked against other degrees.
                placed = {name: replace(item, shape=None) for name, item in plan.inputs.items()}
                plan = replace(plan, mesh=mesh, inputs=placed)
                spec = MeshSpec.resolve(mesh, prod(mesh.values()))
                # Rules are checked by value where the plan itself is lowered.
                core = compile_core(self.model, plan, spec, self._inputs(point), check="off")
            except (PlanError, RuntimeError, ValueError, IndexError, TypeError):
                # The user's own code may refuse a size too (a table of positions that is too short).
                return None
        sent = collectives(self.model, core)
        return Probe(dict(zip(ids(sent), [c.elements for c in sent], strict=True)), core)

    def _inputs(self, point: Point) -> dict[str, Any]:
        made = {}
        for name, example in self.core.examples.items():
            leaves = [self._leaf(leaf, point) for leaf in example.leaves]
            made[name] = compat.unflatten(leaves, example.structure)
        return made

    def _leaf(self, leaf: Leaf, point: Point) -> Any:
        if leaf.shape is None:
            return leaf.constant
        known = self.roles.get(leaf.key, (None,) * len(leaf.shape))
        shape = [size if role is None else point[role] for size, role in zip(leaf.shape, known, strict=True)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


def further(
    prober: Prober, base: Point, name: str, candidates: Sequence[int], want: int = 2
) -> tuple[list[int], list[int]]:
    """(values, others): up to `want` values of variable `name` at which the plan lowers to the same collectives as at
    `base`, and those tried at which it is refused or becomes another program."""
    home = prober.at(base)
    good: list[int] = []
    bad: list[int] = []
    for v in candidates:
        if len(good) == want:
            break
        probe = prober.at({**base, name: v})
        same = probe is not None and home is not None and list(probe.elements) == list(home.elements)
        (good if same else bad).append(v)
    return good, bad
