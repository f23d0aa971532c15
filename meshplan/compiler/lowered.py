"""What lowering yields: the program of a rank as data, independent of any process group."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshplan.compiler.beside import Beside
from meshplan.compiler.bind import Bound
from meshplan.compiler.check import Checked
from meshplan.compiler.edits import Edit
from meshplan.compiler.examples import Example
from meshplan.compiler.kinds import Kind
from meshplan.compiler.sites import Move, Site
from meshplan.compiler.timeline import Event
from meshplan.compiler.uses import Decided
from meshplan.errors import Where
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard

if TYPE_CHECKING:
    from meshplan.compiler.experts import ExpertsAt


@dataclass(frozen=True)
class Boundary:
    """One redistribution of the program. `implicit` ones were asked for by an op, not by the plan; `shared` ones are done
    by whichever of their sites runs first; of what `regather` ones gather only the shard is kept for backward."""

    site: Site
    move: Move
    implicit: bool
    shared: bool
    where: Where | None
    regather: bool = False


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter lives and how its gradient is made whole.

    Attributes:
        name: its canonical name.
        shards: (axis, Shard) for every axis it is sharded on other than by FSDP, outermost first.
        reduce: axes on which its gradient is a partial sum when backward has run (data axes: a partial mean).
        reached: whether a backward from the outputs gives it a gradient.
        routed: whether it holds experts, each of which is on the ranks of its place in ep alone: `reduce` then has the axes
            of its copies, and what a rank holds is a sum over the tokens of all ranks of ep.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    shards: tuple[tuple[str, Shard], ...]
    reduce: tuple[str, ...]
    reached: bool = True
    routed: bool = False


@dataclass(frozen=True)
class Program:
    """The lowered program for one input signature."""

    signature: tuple[Any, ...]
    boundaries: tuple[Boundary, ...]
    edits: dict[str, dict[int, Edit]]
    outputs: tuple[tuple[str, tuple[Kind, ...], tuple[int, ...], bool], ...]
    layouts: tuple[tuple[str, str, str, tuple[int, ...], tuple[Kind, ...]], ...]
    events: tuple[Event, ...]
    axes: tuple[str, ...]
    first_only: tuple[tuple[str, str, str], ...]
    calls: frozenset[tuple[str, str]]
    decided: tuple[Decided, ...] = ()
    checked: Checked = field(default_factory=Checked)
    asked: tuple[bool, ...] = ()  # see `meshplan.compiler.tracing`
    flex: frozenset[str] = frozenset()  # modules in whose code attention is by flex_attention
    spared: tuple[int, ...] = ()  # calls of the single device that a rank leaves out: see spared.py
    beside: tuple[Beside, ...] = ()  # what computes while experts' tokens travel
    single: str = ""  # the single device's program: see fingerprint.py
    merged: frozenset[tuple[int, int]] = frozenset()  # (call, result) whose gradients are right in sum: see equal_heads.py


@dataclass(frozen=True)
class Core:
    """Everything the compiler derived for one model, plan and world, and the inputs it was lowered for."""

    bound: Bound
    spec: MeshSpec
    params: dict[str, ParamPlan]
    program: Program
    examples: dict[str, Example] = field(default_factory=dict)
    experts: ExpertsAt | None = None

    def facts(self) -> dict[str, str]:
        """What all ranks of one program have alike, by topic: the plan, and everything that decides which collectives a rank
        takes part in and in which order."""
        program = self.program
        calls = [
            (path, n, [(at, m.axis, m.src, m.dst) for at, m in e.converts], e.replacement and e.replacement.name)
            for path, edits in sorted(program.edits.items()) for n, e in sorted(edits.items())
            if e.converts or e.replacement
        ]  # fmt: skip
        return {
            "plan": hashlib.sha256(self.bound.plan.to_yaml().encode()).hexdigest(),
            "inputs": repr(program.signature),
            "parameters": digest([(p.name, p.shape, p.dtype, p.shards, p.reduce) for p in self.params.values()]),
            "boundaries": digest(
                [(b.site, b.move.axis, b.move.src, b.move.dst, b.regather) for b in program.boundaries]
            ),
            "calls": digest(calls),
            "what the model itself calls": program.single,
            "outputs": digest([(key, kinds) for key, kinds, _, _ in program.outputs]),
        }


def digest(value: object) -> str:
    """A short hash of what `value` shows."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
