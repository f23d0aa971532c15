"""The arguments of a module's `forward`, and which of them a name, an index or a key path of a plan means."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from meshplan.errors import PlanError, Where
from meshplan.plan.values import nearest_word


@dataclass(frozen=True)
class Arguments:
    """What `forward` takes, self left out.

    Attributes:
        positional: names that may be given by position, in order.
        keyword_only: names that may not.
        required: names without a default.
        more_positional, more_keyword: it has `*args`, it has `**kwargs`.
    """

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: tuple[str, ...]
    more_positional: bool
    more_keyword: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return self.positional + self.keyword_only

    def resolve(self, key: str, *, where: Where | None, module: str) -> str:
        """`key` with its head as the argument's own name: `"0"`, `"x"` and `"x.mask"` on `forward(x)` are `"x"`, `"x"`
        and `"x.mask"`; `""` is the first argument. A position that falls into `*args` stays an index.

        Raises PlanError: `no-such-argument`, `more-layouts-than-inputs` for an index past the last argument.
        """
        if key == "":
            return self._first(where, module)
        head, dot, rest = key.partition(".")
        if head.isdigit():
            if int(head) < len(self.positional):
                head = self.positional[int(head)]
            elif not self.more_positional:
                raise PlanError(
                    f"a layout for input {head}, and forward takes {len(self.positional)} by position",
                    code="more-layouts-than-inputs",
                    where=where,
                    module=module,
                    legal=[f"{i}: {name}" for i, name in enumerate(self.positional)] or "no input",
                )
        elif head not in self.names and not self.more_keyword:
            raise PlanError(
                f"forward has no argument {head!r}{nearest_word(head, self.names)}",
                code="no-such-argument",
                where=where,
                module=module,
                legal=list(self.names) or "no argument",
            )
        return head + dot + rest

    def _first(self, where: Where | None, module: str) -> str:
        if self.positional:
            return self.positional[0]
        if self.more_positional:
            return "0"
        if self.keyword_only:
            return self.keyword_only[0]
        raise PlanError(
            "forward takes no named input that a bare layout could be for",
            code="more-layouts-than-inputs",
            where=where,
            module=module,
            legal="{<argument name>: {<axis>: <placement>}}" if self.more_keyword else "no input",
        )


def arguments_of(module: nn.Module) -> Arguments:
    """The arguments of `module.forward`; decorated forwards count as what they wrap."""
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a forward without a readable signature takes anything
        return Arguments((), (), (), True, True)
    named = [p for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    return Arguments(
        positional=tuple(p.name for p in named if p.kind is not kinds.KEYWORD_ONLY),
        keyword_only=tuple(p.name for p in named if p.kind is kinds.KEYWORD_ONLY),
        required=tuple(p.name for p in named if p.default is kinds.empty),
        more_positional=any(p.kind is kinds.VAR_POSITIONAL for p in parameters),
        more_keyword=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
    )
