"""Declared outputs that a module does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshplan.compiler.bind import Bound
from meshplan.errors import PlanError


def refuse_unknown_outputs(bound: Bound, layouts: Iterable[tuple[Any, ...]]) -> None:
    """Raise PlanError `no-such-output` for a module of whose declared outputs none was returned: a layout that is meant for
    nothing would be passed over in silence. Of several, some may be left out (a loss without labels).

    Arguments:
        layouts: what entered and left the modules that ran: (path, side, key, ...).
    """
    returned: dict[str, list[str]] = {}
    for path, side, key, *_ in layouts:
        if side == "output":
            returned.setdefault(path, []).append(key)
    for path, module in bound.modules.items():
        keys = set(module.output) - {""}
        there = list(dict.fromkeys(returned.get(path, [])))
        known = {"0"} if there == [""] else set(there)
        if keys and there and not keys & known and "" not in module.output:
            raise PlanError(
                f"{path or 'the model'} returns no output {' or '.join(sorted(map(repr, keys)))}", code="no-such-output",
                module=path, where=module.where,
                legal=["a bare layout: it returns one tensor"] if there == [""] else [key for key in there if key],
            )  # fmt: skip
