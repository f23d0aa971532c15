"""Sites: the places of the user's program where a layout changes, and what was decided for each.

A redistribution wanted by an op is hosted, cheapest first, at the input of the innermost module that was handed the tensor,
at the view of the parameter, or in front of the very call. One tensor wanted in one layout by several modules is
redistributed once, at the input of their nearest common ancestor that was handed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.compiler.kinds import Kind
from meshplan.errors import Where


@dataclass(frozen=True)
class Site:
    """Where a redistribution stands.

    Attributes:
        side: "input" or "output" of `module`, "param" (the view of parameter `key` in `module`), or "call".
        key: argument name or index, output key path, parameter name, or `<ordinal>:<leaf index>` of a call
            (of another module: see `Edit`).
    """

    side: str
    module: str
    key: str

    def __str__(self) -> str:
        return f"{self.module or '(model)'} {self.side} {self.key}".rstrip()


@dataclass(frozen=True)
class Move:
    """One redistribution on one axis: kinds by letter (`S(1)`, `R`, `I`...), the dim and its global length as the axis sees
    it, and the parts in that length that are each cut on their own."""

    axis: str
    src: str
    dst: str
    dim: int
    size: int
    src_kind: Kind
    dst_kind: Kind
    parts: tuple[int, ...] | None = None


TURNS = 3  # how often one site may change its mind: an owner of its gradient becomes known, a use is found later


@dataclass
class Decisions:
    """What earlier passes settled; a pass that needs more adds to it and the program is propagated again.

    Attributes:
        moves: the kind a tensor has behind a site, by axis. gathered: who owns the gradient of a gathered value.
        asked: sites where an op asked for a move, with its line. declared: those among them that the plan declares.
        alike: (module, argument, axis) that are whole in every call of a module whose calls would differ there.
        split: parameters and axes that are split uses and whole ones at once, seen as R by every use.
        contested: sites and axes on which uses want different kinds, pass after pass: each use moves for itself there.
    """

    moves: dict[Site, dict[str, Kind]] = field(default_factory=dict)
    gathered: dict[tuple[Site, str], Kind] = field(default_factory=dict)
    asked: dict[Site, Where | None] = field(default_factory=dict)
    declared: set[Site] = field(default_factory=set)
    alike: set[tuple[str, str, str]] = field(default_factory=set)
    split: set[tuple[str, str]] = field(default_factory=set)
    contested: set[tuple[Site, str]] = field(default_factory=set)
    changed: bool = False
    _turns: dict[tuple[Site, str], int] = field(default_factory=dict)

    def add(self, site: Site, axis: str, kind: Kind, where: Where | None) -> None:
        """Host a move to `kind` at `site` from the next pass on."""
        held = self.moves.setdefault(site, {})
        if (site, axis) not in self.contested and held.get(axis) != kind:
            self._turns[site, axis] = self._turns.get((site, axis), 0) + 1
            if self._turns[site, axis] > TURNS:
                self.contest(site, axis)
            else:
                held[axis] = kind
            self.changed = True
        self.asked.setdefault(site, where)

    def contest(self, site: Site, axis: str) -> None:
        """No move of `axis` is hosted at `site` any more: each use makes its own."""
        self.contested.add((site, axis))
        self.moves.get(site, {}).pop(axis, None)
        self.changed = True
