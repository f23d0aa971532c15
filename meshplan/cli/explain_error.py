"""`meshplan explain-error CODE`: what a refusal means, an example of it, and its cure."""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

import meshplan
from meshplan.errors import PlanError

SMALL = """
In the example, `Mlp` is a model with `up`, 8 features to 6, and `down` back to 8, called with `x`; and `plan(*rules)` is
a plan for it on `tp: 2`.
"""


@cache
def folder() -> Path:
    """Where the pages are: inside the installed package, or beside it in a source tree."""
    package = Path(meshplan.__file__).parent
    installed = package / "docs" / "errors"
    return installed if installed.is_dir() else package.parent / "docs" / "errors"


def codes() -> list[str]:
    """Every code that has a page, sorted."""
    return sorted(page.stem for page in folder().glob("*.md"))


def page(code: str) -> str:
    """The page of `code`, in Markdown. Brackets around the code, as messages print it, are taken off.

    Raises PlanError `no-such-code`.
    """
    name = code.strip().strip("[]")
    known = codes()
    if name not in known:
        raise PlanError(
            f"no error has the code {name!r}",
            code="no-such-code",
            legal=difflib.get_close_matches(name, known, n=3) or "`meshplan explain-error`, which lists all codes",
        )
    text = (folder() / f"{name}.md").read_text(encoding="utf-8")
    return text + SMALL if "Mlp" in text else text


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("explain-error")(explain_error)


def explain_error(
    code: Annotated[
        str | None, typer.Argument(help="The code in brackets at the end of an error's first line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Say what the error CODE means and how to cure it; without CODE, list all codes."""
    if code is None:
        typer.echo(json.dumps(codes(), indent=2) if as_json else "\n".join(codes()))
        return
    text = page(code)
    if as_json:
        typer.echo(json.dumps({"code": code.strip().strip("[]"), "page": text}, indent=2))
        return
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text, nl=False)
