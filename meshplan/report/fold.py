"""Folding of repeated layers: modules that differ only in an index are shown once, with the indices they stand for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Fold(Generic[T]):
    """Items shown together.

    Attributes:
        label: path of the repeated module, as `layers.[0-31]`; empty for items outside any indexed module.
        count: how many modules the label stands for.
        items: (path within the module, item) of the first of them, in order; their paths may hold further indices.
    """

    label: str
    count: int
    items: tuple[tuple[str, T], ...]


def split_index(path: str) -> tuple[str, int, str] | None:
    """`layers.3.attention.wq` as ("layers", 3, "attention.wq"), at its first index; None if it has none."""
    parts = path.split(".")
    for at, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:at]), int(part), ".".join(parts[at + 1 :])
    return None


def star(path: str) -> str:
    """`path` with every index replaced by `*`: what the layers of a model have in common."""
    return ".".join("*" if p.isascii() and p.isdigit() else p for p in path.split("."))


def index_text(indices: Iterable[int]) -> str:
    """Indices in short: `3`, `[0-31]`, `[0-2,5]`."""
    ordered = sorted(set(indices))
    runs: list[list[int]] = []
    for i in ordered:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    if len(ordered) == 1:
        return str(ordered[0])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


def fold(items: Sequence[tuple[str, T]], key: Callable[[T], Hashable]) -> list[Fold[T]]:
    """Fold (path, item) pairs by the first index in their paths.

    Two indexed modules fold when they hold the same paths with equal `key`s in the same order, next to each other or
    not. Order is that of first appearance; items outside indexed modules stay in runs between them.
    """
    blocks: dict[tuple[str, int], list[tuple[str, T]]] = {}
    order: list[tuple[str, int] | list[tuple[str, T]]] = []
    for path, item in items:
        split = split_index(path)
        if split is None:
            if order and isinstance(order[-1], list):
                order[-1].append((path, item))
            else:
                order.append([(path, item)])
            continue
        prefix, index, rest = split
        if (prefix, index) not in blocks:
            blocks[prefix, index] = []
            order.append((prefix, index))
        blocks[prefix, index].append((rest, item))
    groups: dict[Hashable, list[tuple[str, int]]] = {}
    for block, held in blocks.items():
        groups.setdefault((block[0], tuple((rest, key(item)) for rest, item in held)), []).append(block)
    shown = {members[0]: members for members in groups.values()}
    out: list[Fold[T]] = []
    for entry in order:
        if isinstance(entry, list):
            out.append(Fold("", 1, tuple(entry)))
        elif entry in shown:
            label = ".".join(s for s in (entry[0], index_text(i for _, i in shown[entry])) if s)
            out.append(Fold(label, len(shown[entry]), tuple(blocks[entry])))
    return out
