"""Which combinations of parameters a test runs with: a few that cover every value, or all with MESHPLAN_TESTS=whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any


def covering(many: Iterable[Any], few: Iterable[Any], times: int = 1) -> list[tuple[Any, Any]]:
    """Pairs of `many` x `few`: each of `many` with `times` (1 or 2) of the others, in turns, so that these share out alike.

    All of them where the environment says MESHPLAN_TESTS=whole: what a change to what they test is run with.
    """
    first, second = list(many), list(few)
    if os.environ.get("MESHPLAN_TESTS") == "whole":
        return list(itertools.product(first, second))
    n = len(second)
    # The second turn begins elsewhere each time, or values would meet the same ones again.
    step = [1 + i // n % max(1, n - 1) for i in range(len(first))]
    return [(a, second[(i + t * step[i]) % n]) for i, a in enumerate(first) for t in range(min(times, n))]
