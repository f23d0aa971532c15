"""Who talks to whom: the groups, links and nodes of a mesh as data, and as a table that stays readable at any size."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshplan.mesh.expert_view import VIEW, ExpertView
from meshplan.mesh.ranktext import ranks_short
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import LinkUse, MeshWarning, Topology, link_use, shown_axes, warnings

WHOLE_TABLE = 64
"""Worlds up to this size have every group in the table; of larger ones, `SHOWN_GROUPS` show the pattern of an axis."""
SHOWN_GROUPS = 3
SHOWN_NODES = 8
LISTED_RANKS = 1024
"""Worlds up to this size list every group in the JSON; larger ones give first ranks and offsets, which say the same."""


@dataclass(frozen=True)
class AxisMap:
    """The groups of one axis, or of several flattened.

    Attributes:
        label: the axes joined by `+`.
        count: number of groups.
        use: their size and the links they run on.
        offsets: members relative to the first rank; every group is its first rank plus these.
        firsts: the first ranks of the groups that the table writes out.
    """

    label: str
    count: int
    use: LinkUse
    offsets: tuple[int, ...]
    firsts: tuple[int, ...]


@dataclass(frozen=True)
class RankMap:
    """A mesh laid on nodes. `axes` as `shown_axes` lists them: innermost first. With a `view`, `experts` are the axes of the
    experts' view of the same ranks."""

    spec: MeshSpec
    topology: Topology
    axes: tuple[AxisMap, ...]
    warnings: tuple[MeshWarning, ...]
    view: ExpertView | None = None
    experts: tuple[AxisMap, ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes in use, the last one perhaps in part."""
        return -(-self.spec.world_size // self.topology.node_size)

    def to_dict(self) -> dict[str, Any]:
        """What `meshplan ranks --json` prints: plain data, with every group for worlds up to `LISTED_RANKS`."""
        axes = [self._axis(axis, self.spec) for axis in self.axes]
        experts = {}
        if self.view is not None:
            spec = self.view.spec
            experts = {
                "experts": {
                    "borrowed": self.view.borrowed,
                    "axes": [{"axis": axis.label, **self._axis(axis, spec)} for axis in self.experts],
                }
            }
        return experts | {
            "mesh": dict(self.spec.axes),
            "world_size": self.spec.world_size,
            "node_size": self.topology.node_size,
            "nodes": self.nodes,
            "axes": axes,
            "warnings": [{"code": w.code, "axis": w.axis, "message": w.message} for w in self.warnings],
        }

    def _axis(self, axis: AxisMap, spec: MeshSpec) -> dict[str, Any]:
        listed = spec.world_size <= LISTED_RANKS
        return {
            "axes": list(axis.use.axes),
            "size": axis.use.size,
            "groups": [list(group) for group in spec.groups(*axis.use.axes)] if listed else None,
            "group_count": axis.count,
            "first_group": [axis.firsts[0] + offset for offset in axis.offsets],
            "link": axis.use.link,
            "nodes_per_group": axis.use.nodes,
            "neighbours_inside": axis.use.inside,
            "neighbours_across": axis.use.across,
        }

    def __rich__(self) -> RenderableType:
        world, node = self.spec.world_size, self.topology.node_size
        head = f"{self.spec}   {_count(world, 'rank')}, {_count(self.nodes, 'node')} of {node}"
        parts: list[RenderableType] = [Text(head, style="bold")]
        parts += [self._axes_table(self.axes), self._nodes_table()] if self.axes else []
        if self.view is not None:
            parts += [Text(f"experts: {self.view}", style="bold"), self._axes_table(self.experts)]
        parts += [Text(f"warning: {w.message} [{w.code}]", style="yellow") for w in self.warnings]
        return Group(*parts)

    def _axes_table(self, axes: tuple[AxisMap, ...]) -> Table:
        table = _table("axis", "size", "groups", "link", "neighbours", "ranks of each group")
        for axis in axes:
            use = axis.use
            pairs = f"{use.across} of {use.inside + use.across} across" if use.across else f"{use.inside} inside"
            # A text, since "[...]" in a string is markup to rich.
            groups = [f"[{ranks_short(first + offset for offset in axis.offsets)}]" for first in axis.firsts]
            more = axis.count - len(groups)
            groups += [f"and {more:,} more"] if more else []
            link = Text(use.link or "-", style="yellow" if use.across else "")
            table.add_row(axis.label, f"{use.size:,}", f"{axis.count:,}", link, pairs, Text("  ".join(groups)))
        return table

    def _nodes_table(self) -> Table:
        names = [name for name, degree in self.spec.axes if degree > 1]
        table = _table("node", "ranks", *names)
        for at in range(min(self.nodes, SHOWN_NODES)):
            first = at * self.topology.node_size
            last = min(first + self.topology.node_size, self.spec.world_size) - 1
            coords = [self.spec.coords(rank) for rank in range(first, last + 1)]
            held = [ranks_short(sorted({coord[name] for coord in coords})) for name in names]
            table.add_row(str(at), ranks_short(range(first, last + 1)), *held)
        if self.nodes > SHOWN_NODES:
            table.add_row(f"and {self.nodes - SHOWN_NODES:,} more", "", *[""] * len(names))
        return table


def rank_map(spec: MeshSpec, topology: Topology | None = None, view: ExpertView | None = None) -> RankMap:
    """The rank map of `spec` on `topology` (nodes of 8 if None), with the experts' `view` of it. Costs the groups' sizes, not the
    world's."""
    topology = topology or Topology()
    axes = tuple(_axis_map("+".join(names), names, spec, topology) for names in shown_axes(spec))
    if view is None:
        return RankMap(spec, topology, axes, warnings(spec, topology))
    experts = tuple(_axis_map(name, view.axes(name), view.spec, topology) for name in VIEW if view.degree(name) > 1)
    return RankMap(spec, topology, axes, (*warnings(spec, topology), *_experts_apart(view, experts)), view, experts)


def _axis_map(label: str, names: tuple[str, ...], spec: MeshSpec, topology: Topology) -> AxisMap:
    shown = spec.world_size if spec.world_size <= WHOLE_TABLE else SHOWN_GROUPS
    use = link_use(spec, topology, *names)
    return AxisMap(label, spec.world_size // use.size, use, spec.offsets(*names), _firsts(spec, names, shown))


def _experts_apart(view: ExpertView, experts: tuple[AxisMap, ...]) -> list[MeshWarning]:
    """`ep-across-nodes`: what it costs is said without numbers, since the routing decides on it."""
    across = [axis for axis in experts if axis.label == "ep" and axis.use.across]
    return [
        MeshWarning(
            "ep-across-nodes",
            "ep",
            f"ep {axis.use.size} spans {axis.use.nodes} nodes: tokens whose experts are on another node cross the network, twice "
            "forward and twice backward in each of these layers.",
        )
        for axis in across
    ]


def to_text(ranks: RankMap, width: int = 100) -> str:
    """The table without colour, in lines of at most `width` characters."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(ranks)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def log_rank_map(
    spec: MeshSpec, rank: int, topology: Topology | None = None, view: ExpertView | None = None
) -> None:
    """Log the table and its warnings once, on rank 0, to the logger `meshplan`."""
    log = logging.getLogger("meshplan")
    if rank != 0:
        return
    ranks = rank_map(spec, topology, view)
    log.info("rank map\n%s", to_text(replace(ranks, warnings=())))
    for warning in ranks.warnings:
        log.warning("%s [%s]", warning.message, warning.code)


def _firsts(spec: MeshSpec, axes: tuple[str, ...], limit: int) -> tuple[int, ...]:
    """The first ranks of the first `limit` groups: mixed-radix counting over the other axes, innermost fastest."""
    leaves = spec.leaves(*axes)
    others = [(degree, spec.stride(name)) for name, degree in spec.axes if name not in leaves]
    firsts = []
    for number in range(min(limit, spec.world_size // spec.degree(*axes))):
        first = 0
        for degree, stride in reversed(others):
            number, at = divmod(number, degree)
            first += at * stride
        firsts.append(first)
    return tuple(firsts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        # Everything but the last column keeps its width; the last wraps.
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"
