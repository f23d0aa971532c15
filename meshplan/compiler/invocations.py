"""A module that is called several times has one set of boundaries and edits, so all its calls must want the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshplan.compiler.edits import Edit
from meshplan.compiler.frames import Frame
from meshplan.compiler.kinds import Kind, N, replicated
from meshplan.compiler.sites import Move, Site
from meshplan.compiler.uses import settled
from meshplan.errors import PlanError, Where

Moved = tuple[Site, Move, Where | None]


@dataclass
class Invocations:
    """Which call of its module each move and each edit belongs to; a call is known by its frame's serial number.

    Attributes:
        calls: by module path, in order.
        owners: the call of each move, in the order in which moves are recorded.
        edits: (call, module path, edit).
        given: by module path, for each call the kinds of what the caller hands over, by argument.
        quiet: by call, the inputs that carry no gradient: what a move owes to backward does not matter to them.
        silent: the calls made with gradients off, in all of which it does not.
    """

    calls: dict[str, list[int]] = field(default_factory=dict)
    owners: list[int | None] = field(default_factory=list)
    edits: list[tuple[int, str, Edit]] = field(default_factory=list)
    quiet: dict[int, frozenset[str]] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    given: dict[str, list[dict[str, list[Kind]]]] = field(default_factory=dict)

    def entered(self, frame: Frame, handed: int, quiet: Iterable[str], silent: bool = False) -> None:
        """A call begins; the moves from number `handed` on were made of what it is handed, of which `quiet` is without
        gradient; `silent` if gradients are off."""
        if silent:
            self.silent.add(frame.serial)
        self.quiet[frame.serial] = frozenset(quiet)
        self.owners[handed:] = [frame.serial] * (len(self.owners) - handed)
        self.calls.setdefault(frame.path, []).append(frame.serial)

    def current(self, path: str, stack: Iterable[Frame]) -> int | None:
        """The running call of the module at `path`, else its last one; None if it was never called."""
        running = [frame.serial for frame in stack if frame.path == path]
        called = running or self.calls.get(path, [])
        return called[-1] if called else None


def once(invocations: Invocations, moves: list[Moved]) -> tuple[list[Moved], dict[str, dict[int, Edit]]]:
    """The moves and the edits of one call of each module, which every other call of it repeats: the first of those in which
    most inputs carry gradients, of those made with gradients on if there are any.

    Raises PlanError `calls-differ` where one does not.
    """
    quiet, silent = invocations.quiet, invocations.silent
    first = {
        path: min(serials, key=lambda n: (n in silent, len(quiet.get(n, ()))))
        for path, serials in invocations.calls.items()
    }
    by_call: dict[tuple[str, int | None], list[Moved]] = {}
    for owner, item in zip(invocations.owners, moves, strict=True):
        by_call.setdefault((item[0].module, owner), []).append(item)
    edits: dict[tuple[str, int], dict[int, Edit]] = {}
    for call, path, edit in invocations.edits:
        edits.setdefault((path, call), {})[edit.ordinal] = edit
    for path, serials in invocations.calls.items():
        head = first[path]
        for other in serials:
            if other != head:
                hushed = None if other in silent else quiet.get(other, frozenset())
                _check_moves(path, by_call.get((path, head), []), by_call.get((path, other), []), hushed)
                _check_edits(path, edits.get((path, head), {}), edits.get((path, other), {}), other in silent)
    kept = [
        item
        for owner, item in zip(invocations.owners, moves, strict=True)
        if owner is None or owner == first[item[0].module]
    ]
    return kept, {path: found for (path, call), found in edits.items() if call == first[path]}


def unlike(invocations: Invocations, path: str) -> list[tuple[str, int]]:
    """The (argument, axis number) of which calls of the module at `path` are handed different kinds. What carries no gradient
    goes with any owner of one."""
    found = []
    calls = invocations.given.get(path, [])
    for key in calls[0] if calls else ():
        many = [call[key] for call in calls if key in call]
        for k in range(len(many[0])):
            kinds = [settled(kinds[k]) for kinds in many]
            known = {kind for kind in kinds if kind != N}
            if len(known) > 1 or (N in kinds and any(not replicated(kind) for kind in known)):
                found.append((key, k))
    return found


def _check_moves(path: str, head: list[Moved], other: list[Moved], quiet: frozenset[str] | None) -> None:
    """Raise if they differ, apart from what is owed to the gradients of `quiet` inputs (None: of anything)."""
    one, two = ([p for p in (_plain(m, quiet) for m in found) if p is not None] for found in (head, other))
    if one == two:
        return
    shown = [
        ", ".join(f"{s.side} {s.key} {m.src} -> {m.dst} on {m.axis}" for s, m, _ in found) for found in (head, other)
    ]
    where = next((where for *_, where in (*other, *head) if where), None)
    raise _differ(path, f"one needs {shown[0] or 'no redistribution'}, another {shown[1] or 'none'}", where)


def _check_edits(path: str, head: dict[int, Edit], other: dict[int, Edit], silent: bool) -> None:
    for ordinal in sorted(head.keys() | other.keys()):
        one, two = head.get(ordinal), other.get(ordinal)
        if _change(one, silent) != _change(two, silent):
            found = one or two
            assert found is not None
            raise _differ(path, f"{found.func} runs differently on shards in one than in another", found.where)


def _plain(item: Moved, quiet: frozenset[str] | None) -> tuple[Any, ...] | None:
    site, move, _ = item
    src, dst = move.src, move.dst
    if quiet is None or (site.side == "input" and site.key in quiet):
        src, dst = _forward(src), _forward(dst)
    return None if src == dst == "N" else (site, move.axis, src, dst, move.dim, move.size, move.parts)


def _forward(kind: str) -> str:
    """I, R and N differ in backward only."""
    return "N" if kind in "IR" else kind


def _change(edit: Edit | None, silent: bool) -> tuple[Any, ...] | None:
    if edit is None:
        return None
    same = _forward if silent else str
    converts = [(leaf, m.axis, same(m.src), same(m.dst), m.dim, m.size, m.parts) for leaf, m in edit.converts]
    converts = [c for c in converts if not c[2] == c[3] == "N"]
    found = edit.func, edit.sized, converts, edit.replacement
    # An edit of nothing but what is owed to gradients; a call of a module is edited in nothing else.
    return None if silent and not converts and edit.sized is None and edit.replacement is None else found


def _differ(path: str, how: str, where: Where | None) -> PlanError:
    return PlanError(
        f"{path or 'the model'} is called several times, and its calls differ: {how}",
        code="calls-differ",
        where=where,
        module=path,
        legal="a module of its own for each use, or layouts that make what it is handed alike",
    )
