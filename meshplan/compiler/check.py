"""Check by values: every distinct use of a rule in a program is run with numbers before the program itself runs.

This is the second of three nets. The first, that a rank's program makes the single device's calls with the same values
and constants, is how layouts are derived (`propagate`); the third, whole programs on simulated ranks, is
`meshplan.verify.aligned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.compiler.capture import Trace
from meshplan.compiler.check_shrink import shrink
from meshplan.compiler.check_values import Refuted, refute
from meshplan.compiler.kinds import user_letter
from meshplan.compiler.layout import Axis
from meshplan.compiler.uses import Decided, Use, use_of
from meshplan.errors import PlanError

CHECKS = ("values", "off")


@dataclass(frozen=True)
class Checked:
    """What the value check did.

    Attributes:
        uses: distinct uses in the program.
        skipped: those too large to run and without a small relative, as text: not checked by value.
        how: "values", or "off" where nothing was checked.
    """

    uses: int = 0
    skipped: tuple[str, ...] = ()
    how: str = "off"


_known: dict[Any, Refuted | str | None] = {}
"""Verdicts of this process by the use's key: None held, text says why it was not run."""


def check_uses(decided: Sequence[Decided], axes: Sequence[Axis], trace: Trace) -> Checked:
    """Run every distinct use among `decided` once, on small data with unequal dims, forward and backward.

    Raises PlanError `rule-refuted` for the first use in program order in which the ranks of an axis do not add up to
    one device, with the user's line.
    """
    seen: set[Any] = set()
    skipped: list[str] = []
    for item in decided:
        for k, axis in enumerate(axes):
            use = use_of(item, k, axis.degree, trace)
            if use is None or use.key in seen:
                continue
            seen.add(use.key)
            verdict = judge(use)
            if isinstance(verdict, str):
                skipped.append(f"{show(use)} on {axis.name} ({verdict})")
            elif verdict is not None:
                raise PlanError(
                    f"{show(use)} on {axis.name} does not give the single-device value: {verdict.what}, "
                    f"relative distance {verdict.distance:.1e}",
                    code="rule-refuted", where=item.call.where, module=item.call.module,
                    legal="a layout of R in front of this call, in place of the one it was given",
                )  # fmt: skip
    return Checked(len(seen), tuple(skipped), "values")


def judge(use: Use) -> Refuted | str | None:
    """The verdict on one use, from memory where it was asked before."""
    if use.key not in _known:
        _known[use.key] = _judged(use)
    return _known[use.key]


def _judged(use: Use) -> Refuted | str | None:
    small = shrink(use)
    if small is None:
        return "too large to run, and no small relative of it was found"
    if small.key != use.key:
        if small.key not in _known:
            _known[small.key] = refute(small)
        return _known[small.key]
    return refute(small)


def show(use: Use) -> str:
    """`linear(f32[8, 64]: S(0), f32[32, 64]: R) -> S(0)`, at global shapes."""
    ins = ", ".join(f"{list(t.shape)}: {user_letter(k)}" for t, k in zip(use.tensors, use.ins, strict=True))
    return f"{use.name}({ins}) -> {', '.join(user_letter(k) for k in use.outs)} over {use.degree} ranks"
