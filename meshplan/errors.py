"""The one public exception: a plan that cannot be honoured, said with its place, its subject and its cure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """A place in the user's own text.

    Attributes:
        file: path of the plan file or of the Python file that built the rule.
        line: 1-based line, or None where only the file is known.
        column: 1-based column, or None.
        text: the offending source line, shown with a pointer under `column`.
    """

    file: str
    line: int | None = None
    column: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        parts = [self.file] + [str(n) for n in (self.line, self.column) if n is not None]
        return ":".join(parts)


class PlanError(Exception):
    """Raised before the first collective whenever meshplan cannot give the single-device numbers.

    Arguments:
        message: one sentence that says what is wrong, naming module, dim, size and degree.
        code: a stable kebab-case code, for example `no-such-module`.
        where: the place in the plan (file, line, column) if there is one.
        module: dotted path of the module concerned, if there is one.
        legal: what would be legal, as one sentence or a list of choices.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "plan",
        where: Where | None = None,
        module: str | None = None,
        legal: str | list[str] | None = None,
    ) -> None:
        self.message, self.code, self.where, self.module, self.legal = message, code, where, module, legal
        super().__init__(self._render())

    def at(self, where: Where | None = None, module: str | None = None) -> PlanError:
        """This error with a place or a module of its own, each as it was where None is given."""
        where, module = self.where if where is None else where, self.module if module is None else module
        return PlanError(self.message, code=self.code, where=where, module=module, legal=self.legal)

    def __reduce__(self):
        # Exceptions cross process boundaries between ranks and the parent; keyword arguments must survive.
        return (_rebuild, (self.message, self.code, self.where, self.module, self.legal))

    def _render(self) -> str:
        head = f"{self.where}: " if self.where else ""
        lines = [f"{head}{self.message} [{self.code}]"]
        if self.where and self.where.text is not None:
            lines.append(f"    {self.where.text}")
            if self.where.column:
                lines.append("    " + " " * (self.where.column - 1) + "^")
        if self.module is not None:
            lines.append(f"  module: {self.module or '(the model itself)'}")
        if self.legal:
            legal = self.legal if isinstance(self.legal, str) else ", ".join(self.legal)
            lines.append(f"  legal:  {legal}")
        return "\n".join(lines)


def _rebuild(message, code, where, module, legal) -> PlanError:
    return PlanError(message, code=code, where=where, module=module, legal=legal)
