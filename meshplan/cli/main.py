"""The command `meshplan`: one subcommand a file of this folder, and errors of the plan said plainly."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from meshplan.cli import bench, demo, diff, explain, explain_error, pattern, plan, ranks, samples, verify
from meshplan.errors import PlanError

PLAN_ERROR = 2
"""Exit status of a plan that cannot be honoured, as of a wrong command line."""


class PlanGroup(TyperGroup):
    """Commands that end with a `PlanError`'s own text on stderr and status 2, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PlanError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(PLAN_ERROR) from error


# Any other exception is a fault of meshplan: a plain traceback, without the values of all local variables.
app = typer.Typer(cls=PlanGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Look at, prove and choose sharding plans for PyTorch modules."""


app.command("ranks")(ranks.ranks)
for command in (explain, pattern, plan, verify, bench, samples, diff, demo, explain_error):
    command.register(app)
