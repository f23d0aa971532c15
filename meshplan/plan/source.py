"""Where a piece of a plan was written: the line of a YAML file, or the line of user code that built the object."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from meshplan.errors import Where

Path = tuple[str | int, ...]


class Mark(NamedTuple):
    """The places of one entry of a YAML mapping or sequence: of its key (the item, in a sequence) and of its value."""

    key: Where
    value: Where


@dataclass(frozen=True)
class Source:
    """A cursor into the user's text: the place of one value of the plan, and of everything below it.

    Attributes:
        default: the place used where nothing finer is known: the line of code of a plan built in Python.
        marks: place of every entry of a plan file by its path, such as `("rules", 0, "params", "weight", "tp")`.
        path: the path this cursor stands at.
    """

    default: Where | None = None
    marks: Mapping[Path, Mark] = field(default_factory=dict)
    path: Path = ()

    def child(self, *keys: str | int) -> Source:
        """The cursor `keys` further down; it need not exist, its place is then that of the nearest existing parent."""
        return Source(self.default, self.marks, self.path + keys)

    @property
    def where(self) -> Where | None:
        """The place of the value here."""
        mark = self._mark()
        return mark.value if mark else self.default

    @property
    def key_where(self) -> Where | None:
        """The place of the key that leads here."""
        mark = self._mark()
        return mark.key if mark else self.default

    def _mark(self) -> Mark | None:
        for end in range(len(self.path), -1, -1):
            mark = self.marks.get(self.path[:end])
            if mark is not None:
                return mark
        return None


def user_source() -> Source:
    """The innermost line on the stack that is not meshplan's own: the user's line that builds a rule or a section."""
    frame: FrameType | None = sys._getframe(1)
    # The `__init__` that dataclasses generates runs with the globals of the class's module, so it is skipped too.
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "meshplan":
        frame = frame.f_back
    return Source(_where(frame) if frame is not None else None)


def _where(frame: FrameType) -> Where:
    code, line, column = frame.f_code, frame.f_lineno, None
    if frame.f_lasti >= 0 and hasattr(code, "co_positions"):  # Python 3.11 and later
        # One entry per two-byte instruction; the position is that of the call expression, also when it spans lines.
        start, _, col, _ = list(code.co_positions())[frame.f_lasti // 2]
        if start is not None:
            line = start
            column = None if col is None else col + 1
    text = linecache.getline(code.co_filename, line, frame.f_globals).rstrip("\n") or None
    return Where(code.co_filename, line, column if text else None, text)
