"""Writing out, for every layer whose equal was propagated in its place, what was found for that equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshplan.compiler.edits import Edit
from meshplan.compiler.known import Pass
from meshplan.compiler.repeats import moved_path
from meshplan.compiler.sites import Decisions

Here = Callable[[str], str | None]


@dataclass(frozen=True)
class _Found:
    """What was found inside one module."""

    moves: list
    edits: list
    uses: list
    layouts: list
    calls: list
    reached: list[str]
    beside: list


def expand_repeats(result: Pass, settled: Decisions) -> None:
    """Copy the findings of each traced module to the modules it stands for, in the order they were met: a repeat inside a
    traced module is written out before that module's own repeats are."""
    found: dict[str, _Found] = {}
    for new, old in dict.fromkeys(result.repeats):
        if new == old:  # a later call of the module itself
            continue
        if old not in found:
            found[old] = _inside(result, old)
        _copy(result, settled, found[old], old, new)


def _inside(result: Pass, path: str) -> _Found:
    prefix = path + "."

    def under(module: str) -> bool:
        return module == path or module.startswith(prefix)

    return _Found(
        [item for item in result.moves if under(item[0].module)],
        [item for item in result.edits.items() if under(item[0])],
        [item for item in result.param_use.items() if under(item[0][0])],
        [item for item in result.layouts if item[0].startswith(prefix)],
        [(a, b) for a, b in result.calls if under(a) and under(b)],
        [name for name in result.reached if under(name)],
        [b for b in result.beside if under(b.experts)],
    )


def _copy(result: Pass, settled: Decisions, found: _Found, old: str, new: str) -> None:
    def here(path: str) -> str | None:
        return moved_path(path, old, new)

    # What is moved on the way into and out of an equal was recorded for each of them: only its inside was skipped.
    # An equal may be handed what another had to gather first, so neither has the other's moves.
    for site, move, where in found.moves:
        if site.module == old and site.side in ("input", "output"):
            continue
        key = (here(site.key) or site.key) if site.side == "param" else site.key
        copied = replace(site, module=here(site.module) or site.module, key=key)
        result.moves.append((copied, move, where))
        if site in result.shared:
            result.shared.add(copied)
        if site in settled.asked:
            settled.asked[copied] = settled.asked[site]
        if site in settled.declared:
            settled.declared.add(copied)
    for path, edits in found.edits:
        result.edits[here(path) or path] = {n: _moved_edit(e, here) for n, e in edits.items()}
    for (path, name, axis), pending in found.uses:
        result.param_use[here(path) or path, here(name) or name, axis] = pending
    for path, side, key, shape, kinds in found.layouts:
        result.layouts.append((here(path) or path, side, key, shape, kinds))
    result.calls |= {(here(a) or a, here(b) or b) for a, b in found.calls}
    result.reached |= {here(name) or name for name in found.reached}
    moved = [(b, here(b.experts), here(b.module)) for b in found.beside]
    result.beside += [replace(b, experts=experts, module=module) for b, experts, module in moved if experts and module]


def _moved_edit(edit: Edit, here: Here) -> Edit:
    if edit.replacement is None:
        return edit
    settings = tuple((k, here(v) or v) if k == "module" else (k, v) for k, v in edit.replacement.settings)
    return replace(edit, replacement=replace(edit.replacement, settings=settings))
