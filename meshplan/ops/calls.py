"""The record of one collective that a semantic operator promises to make, as `explain` counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshplan.runtime.comm import AxisGroup


class Call(NamedTuple):
    """One collective: its name (`all_reduce`, ...), the axis it runs over, and the elements of its full tensor; the dtype where
    an operator sends several."""

    op: str
    axis: str
    elements: int
    dtype: torch.dtype | None = None

    @property
    def bytes(self) -> int:
        """Of the full tensor; needs the dtype."""
        assert self.dtype is not None
        return self.elements * self.dtype.itemsize


def all_reduces(groups: Sequence[AxisGroup], elements: int) -> list[Call]:
    """One `all_reduce` of `elements` per group; groups of one rank send nothing and are left out."""
    return [Call("all_reduce", group.axis, elements) for group in groups if group.size > 1]
