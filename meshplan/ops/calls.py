"""The record of one collective that a semantic operator promises to make, as `explain` counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshplan.runtime.comm import AxisGroup


class Call(NamedTuple):
    """One collective: its name (`all_reduce`, ...), the axis it runs over, and the elements of its full tensor."""

    op: str
    axis: str
    elements: int


def all_reduces(groups: Sequence[AxisGroup], elements: int) -> list[Call]:
    """One `all_reduce` of `elements` per group; groups of one rank send nothing and are left out."""
    return [Call("all_reduce", group.axis, elements) for group in groups if group.size > 1]
