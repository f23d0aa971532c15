"""Edits: what must change in one torch call of the user's code when a rank runs it. Most modules need none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshplan.compiler.sites import Move
from meshplan.errors import Where


@dataclass(frozen=True)
class Replacement:
    """A semantic operator that runs in place of the call: its name in `meshplan.runtime.replace` and its settings by
    plain values (axis names, global sizes, kinds by axis), so that it can be bound to any rank's groups."""

    name: str
    settings: tuple[tuple[str, Any], ...]

    def get(self, key: str) -> Any:
        return dict(self.settings)[key]


@dataclass(frozen=True)
class Edit:
    """The call with this ordinal in its module's own code, with new sizes, redistributed arguments, or replaced. Calls of
    other modules are numbered downwards from -1, and have `converts` alone; `func` is then the path of the one called.

    Attributes:
        sized: (leaves, structure, which leaves are tensors) of the arguments to use, or None to keep the user's.
        converts: redistributions as (index of the flattened argument, move), in order.
    """

    ordinal: int
    func: str
    sized: tuple[tuple[Any, ...], Any, frozenset[int]] | None
    converts: tuple[tuple[int, Move], ...]
    replacement: Replacement | None
    where: Where | None
