"""Patterns that match exactly a set of module paths: `layers.*.attention.{wq,wk,wv}`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from meshplan.plan.patterns import generic, match


def pattern_of(paths: Sequence[str], names: Collection[str]) -> str:
    """A pattern that of `names` matches `paths` and nothing else; `*` where a whole list of layers is meant."""
    wanted = set(paths)
    if len(wanted) == 1:
        return paths[0]
    starred = {generic(path) for path in wanted}
    if len(starred) == 1:
        (pattern,) = starred
        if set(match(pattern, names)) == wanted:
            return pattern
        exact = _ranged(sorted(wanted), pattern)
        if exact is not None and set(match(exact, names)) == wanted:
            return exact
    return "{" + ",".join(sorted(wanted, key=paths.index)) + "}"


def _ranged(paths: list[str], pattern: str) -> str | None:
    """`pattern` with its stars written as the numbers that occur there, as a range where they are one."""
    split = [path.split(".") for path in paths]
    out = []
    for i, segment in enumerate(pattern.split(".")):
        if segment != "*":
            out.append(segment)
            continue
        found = sorted({int(parts[i]) for parts in split})
        if len(found) == 1:
            out.append(str(found[0]))
        elif found == list(range(found[0], found[-1] + 1)):
            out.append(f"[{found[0]}-{found[-1]}]")
        else:
            out.append("{" + ",".join(map(str, found)) + "}")
    return ".".join(out)


def grouped(patterns: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Patterns of one parent as one: `a.*.q`, `a.*.k` become `a.*.{q,k}`; with those that each stands for."""
    by_parent: dict[str, list[str]] = defaultdict(list)
    for pattern in patterns:
        parent, _, last = pattern.rpartition(".")
        plain = not any(c in last for c in "{}[]*") and not any(c in pattern for c in "{}")
        by_parent[parent if plain else pattern].append(pattern)
    out = []
    for parent, members in by_parent.items():
        lasts = [m.rpartition(".")[2] for m in members]
        if len(members) == 1:
            out.append((members[0], members))
        else:
            out.append((f"{parent}.{{{','.join(lasts)}}}" if parent else "{" + ",".join(lasts) + "}", members))
    return out
