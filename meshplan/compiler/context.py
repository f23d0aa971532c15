"""The plan's `context` section on one model: which attention runs over the sequence that cp splits, how, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshplan.compiler.bind import Bound
from meshplan.compiler.edits import Edit
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec, divisors, hybrid_axes
from meshplan.plan.patterns import within
from meshplan.plan.placements import Shard, zigzag
from meshplan.plan.sections import Context

AXIS = "cp"
MARK = "context:"
"""Begins the name of a semantic operator that is attention over a split sequence: `context:ring`, `context:hybrid:2`,
`context:ring@peer`."""


def method_of(operator: str) -> str:
    """The method of an operator of `MARK`."""
    return operator.removeprefix(MARK).partition("@")[0].partition(":")[0]


def inner_of(operator: str | None) -> int | None:
    """The neighbours among which a hybrid operator exchanges heads, None for others."""
    inner = operator.removeprefix(MARK).partition(":")[2] if operator and operator.startswith(MARK) else ""
    return int(inner) if inner else None


def transport_of(operator: str) -> str:
    """How the messages of an operator of `MARK` travel."""
    return operator.partition("@")[2] or "send"


RINGS = ("ring", "hybrid")
"""The methods in which ranks exchange with neighbours."""


@dataclass(frozen=True)
class ContextAt:
    """The modules whose attention runs over cp, and the name of the operator that it runs as."""

    paths: tuple[str, ...]
    operator: str

    @classmethod
    def of(cls, bound: Bound, spec: MeshSpec) -> ContextAt | None:
        """None where the plan has no such section, or cp one rank."""
        section = bound.plan.context
        if section is None or spec.degree(AXIS) == 1:
            return None
        inner = f":{section.inner}" if section.inner is not None else ""
        transport = f"@{section.transport}" if section.transport != "send" else ""
        return cls(bound.attention, f"{MARK}{section.method}{inner}{transport}")

    @staticmethod
    def split(spec: MeshSpec, section: Context | None) -> MeshSpec:
        """`spec` with cp seen as the two axes that a hybrid method exchanges and rings over, where it has both."""
        degree = spec.degree(AXIS)
        if section is None or section.inner is None or degree == 1:
            return spec
        if degree % section.inner:
            raise PlanError(
                f"context.inner is {section.inner}, and cp has {degree} ranks", code="context-heads",
                where=section.source.child("inner").where,
                legal=f"a divisor of {degree}: {', '.join(map(str, divisors(degree)))}",
            )  # fmt: skip
        outer, inner = hybrid_axes(AXIS)
        return spec.split_axis(AXIS, {outer: degree // section.inner, inner: section.inner})

    def covers(self, axis: str, module: str) -> bool:
        """Whether an attention in the code of `module` runs over `axis`."""
        return axis == AXIS and any(within(module, path) for path in self.paths)


def in_order(place: Shard, axis: str, size: int, context: Context | None) -> Shard:
    """An input's declared shard in the order that the plan's `context` deals a sequence of `size` on `axis`."""
    if axis != AXIS or context is None or not context.zigzags or place.parts is not None or size % 2:
        return place
    return replace(place, parts=zigzag(size))


def refuse_unused(bound: Bound, at: ContextAt | None, edits: Iterable[tuple[str, Edit]]) -> None:
    """Raise PlanError `context-unused` for a module of the section in whose code nothing ran over cp."""
    if at is None:
        return
    ran = [path for path, e in edits if e.replacement is not None and e.replacement.name == "context_attention"]
    for path in at.paths:
        if not any(within(module, path) for module in ran):
            raise PlanError(
                f"{path or 'the model'} is in context.attention, and no scaled_dot_product_attention or flex_attention whose "
                "query, key and value are split along their sequence on cp was found in it",
                code="context-unused", module=path, where=bound.plan.context.source.child("attention").where,  # type: ignore[union-attr]
                legal="attention through torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa'), and "
                "inputs placed {cp: S(1)}; attention written out in products gathers its keys without this section",
            )  # fmt: skip


def refuse_compiled_rings(bound: Bound, edits: Iterable[tuple[str, Edit]]) -> None:
    """Raise PlanError `ring-inside-compile` for a ring in a unit that torch is to compile: exchanges between two ranks are no
    operations of a graph, and where a graph breaks, what an edit stands for is not found again."""
    section = bound.plan.compile
    if section is None:
        return
    for path, e in edits:
        rings = e.replacement is not None and e.replacement.name == "context_attention" and e.replacement.get("method") in RINGS
        unit = bound.compile_unit_of(path) if rings else None
        if unit is not None:
            raise PlanError(
                f"attention in {path or 'the model'} rings over cp, and {unit or 'the model'} is compiled",
                code="ring-inside-compile", module=path, where=section.source.where,
                legal="context: {method: allgather} or {method: ulysses}, or units to compile that have no attention in them",
            )  # fmt: skip
