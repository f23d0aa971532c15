"""How every command prints: a table with colours on a terminal, plain elsewhere, or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol

from rich.console import Console, RenderableType

PIPE_WIDTH = 100
"""Characters a line where there is no terminal to ask."""


class Printable(Protocol):
    """A result that is both data and a table."""

    def to_dict(self) -> dict[str, Any]: ...

    def __rich__(self) -> RenderableType: ...


def emit(result: Printable, as_json: bool) -> None:
    """Print `result` on stdout: its `to_dict()` as JSON, or its table."""
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        # A name looked up now and not a default: stdout may have been replaced.
        out = sys.stdout
        width = None if out.isatty() else PIPE_WIDTH
        Console(file=out, width=width, highlight=False).print(result)
