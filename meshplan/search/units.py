"""The FSDP units of a derived plan: the repeated blocks, less what several of them share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from torch import nn

from meshplan.plan.patterns import generic
from meshplan.search.paths import pattern_of


def units_of(model: nn.Module, entered: Collection[str]) -> list[str]:
    """Patterns of the units: the members of every list of modules that forward enters, and that no other such list holds.

    A parameter that two members hold can be in neither of them: the root owns it, and in their place those of their modules
    are units that hold none of it.

    Arguments:
        entered: paths of the modules whose forward runs.
    """
    lists: list[str] = []
    blocks: list[str] = []
    for path, m in model.named_modules():
        if not isinstance(m, (nn.ModuleList, nn.Sequential)) or len(m) < 2 or not path:
            continue
        children = [f"{path}.{name}" for name, _ in m.named_children()]
        inner = any(path.startswith(f"{outer}.") for outer in lists)
        if not inner and set(children) <= set(entered) and next(m.parameters(), None) is not None:
            lists.append(path)
            blocks += children
    shared = _shared(model, blocks)
    units = [path for block in blocks for path in _apart(block, model.get_submodule(block), shared, entered)]
    by_template: dict[str, list[str]] = defaultdict(list)
    for path in units:
        by_template[generic(path)].append(path)
    names = [name for name, _ in model.named_modules()]
    return [pattern_of(paths, names) for paths in by_template.values()]


def _shared(model: nn.Module, blocks: list[str]) -> set[nn.Parameter]:
    """Parameters that more than one of `blocks` holds."""
    holders: dict[nn.Parameter, set[str]] = defaultdict(set)
    for block in blocks:
        for param in model.get_submodule(block).parameters():
            holders[param].add(block)
    return {param for param, paths in holders.items() if len(paths) > 1}


def _apart(path: str, module: nn.Module, shared: set[nn.Parameter], entered: Collection[str]) -> Iterator[str]:
    """`path`, or where it holds something `shared` the largest modules inside that do not."""
    own = set(module.parameters())
    if path not in entered or not own:
        return
    if own.isdisjoint(shared):
        yield path
        return
    for name, child in module.named_children():
        yield from _apart(f"{path}.{name}", child, shared, entered)
