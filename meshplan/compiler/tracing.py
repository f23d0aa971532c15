"""Code that asks whether it is being traced hears, when it runs, what it heard while it was lowered.

transformers builds an attention mask without looking at the padding while it is traced, and looks otherwise: all ones
need no mask. Both compute the same, by different calls; the program that was lowered is the one for fake tensors, so
that is the one that has to run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ASKED = (("transformers.masking_utils", "is_tracing"),)
"""Functions of libraries that models ask: module and name under which they are called."""

_recording: list[list[bool]] = []
_replaying: list[Iterator[bool]] = []


@contextmanager
def recording() -> Iterator[list[bool]]:
    """The answers that code in here is given, in order."""
    _intercept()
    answers: list[bool] = []
    _recording.append(answers)
    try:
        yield answers
    finally:
        _recording.pop()


@contextmanager
def replaying(answers: Sequence[bool]) -> Iterator[None]:
    """Code in here is given `answers`, in order; what it asks beyond them is answered truly."""
    _replaying.append(iter(answers))
    try:
        yield
    finally:
        _replaying.pop()


def _intercept() -> None:
    for module, name in ASKED:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and not hasattr(found, "_meshplan_asked"):
            setattr(sys.modules[module], name, _answering(found))


def _answering(asked: Callable[..., bool]) -> Callable[..., bool]:
    def answer(*args: Any, **kwargs: Any) -> bool:
        if _replaying:
            known = next(_replaying[-1], None)
            if known is not None:
                return known
        found = bool(asked(*args, **kwargs))
        if _recording:
            _recording[-1].append(found)
        return found

    answer._meshplan_asked = asked  # type: ignore[attr-defined]
    return answer
