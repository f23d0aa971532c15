"""Layouts in parts and with copies: options added where a fused projection is split later, or heads are fewer than ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from meshplan.compiler.kinds import Kind
from meshplan.compiler.strategies import Chooser
from meshplan.plan.placements import Shard
from meshplan.search.options import Option, copied, followed, owned
from meshplan.search.program import Program


def add_variants(program: Program, chooser: Chooser, options: list[list[Option]], degree: int) -> None:
    """Extend `options` in place: what a later split wants in parts is made in parts (backwards), what a concatenation or a
    view as few heads makes is passed on (forwards)."""
    for _ in range(2):  # a second time for values that come round through a repeated layer
        wanted: dict[int, dict[Kind, None]] = defaultdict(dict)
        for n in reversed(range(len(program.nodes))):
            _backward(program, chooser, options, n, wanted, degree)
        for n in range(len(program.nodes)):
            _forward(program, chooser, options, n, degree)
    _prune(program, options)


def _special(kind: Kind) -> bool:
    return isinstance(kind, Shard) and (kind.parts is not None or kind.copies > 1)


def _add(options: list[Option], option: Option) -> None:
    if option not in options:
        options.append(option)


def _backward(
    program: Program, chooser: Chooser, options: list[list[Option]], n: int, wanted: dict[int, dict[Kind, None]], degree: int
) -> None:  # fmt: skip
    node = program.nodes[n]
    for o, v in enumerate(node.outs):
        for kind in list(wanted[v]):
            assert isinstance(kind, Shard)
            if kind.copies > 1:
                for option in copied(program, chooser, n, kind.copies, degree):
                    if option.outs[o] == kind:
                        _add(options[n], option)
                continue
            for option in list(options[n]):
                made = option.outs[o]
                if isinstance(made, Shard) and made.dim == kind.dim and not _special(made):
                    for more in _in_parts(program, n, option, kind.parts):
                        _add(options[n], more)
                    _add_regrouped(options[n], option, o, kind)
            _follow_parts(program, chooser, options[n], n, o, kind, degree)
    for option in options[n]:
        for v, kind in zip(node.ins, option.ins, strict=True):
            if _special(kind):
                wanted[v][kind] = None


def _in_parts(program: Program, n: int, option: Option, parts: tuple[int, ...] | None) -> list[Option]:
    """`option` with all its shards cut part by part, if it allows that and the sizes fit."""
    node = program.nodes[n]
    if not option.fused or parts is None or any(_special(k) for k in option.ins):
        return []
    for v, kind in zip((*node.ins, *node.outs), (*option.ins, *option.outs), strict=True):
        if isinstance(kind, Shard) and program.values[v].tensor.shape[kind.dim] != sum(parts):
            return []
    if not all(isinstance(k, Shard) for k in option.outs):
        return []
    ins = tuple(Shard(k.dim, parts) if isinstance(k, Shard) else k for k in option.ins)
    outs = tuple(Shard(k.dim, parts) if isinstance(k, Shard) else k for k in option.outs)
    return [replace(option, ins=ins, outs=outs)]


def _add_regrouped(options: list[Option], option: Option, o: int, kind: Shard) -> None:
    """A split into ranges of which one is split again: its own parts stand in the place of that range."""
    if (
        len(option.ins) != 1
        or not isinstance(option.ins[0], Shard)
        or option.ins[0].parts is None
        or kind.parts is None
    ):
        return
    old = option.ins[0].parts
    if len(old) != len(option.outs) or old[o] != sum(kind.parts):
        return
    outs = tuple(kind if i == o else k for i, k in enumerate(option.outs))
    _add(options, replace(option, ins=(Shard(option.ins[0].dim, (*old[:o], *kind.parts, *old[o + 1 :])),), outs=outs))


def _follow_parts(
    program: Program, chooser: Chooser, options: list[Option], n: int, o: int, kind: Shard, degree: int
) -> None:  # fmt: skip
    """A call of several aten ops and one tensor: cut its input in the parts that its result is wanted in."""
    node = program.nodes[n]
    if len(node.ins) != 1 or kind.parts is None or len(chooser.decomposed(node.call)[0]) < 2:
        return
    shape = program.values[node.ins[0]].tensor.shape
    grads = [program.values[v].grad for v in node.ins], [program.values[v].grad for v in node.outs]
    for d, size in enumerate(shape):
        if size == sum(kind.parts):
            s = followed(chooser, node.call, (Shard(d, kind.parts),), degree)
            if s is not None and s.outs[o] == kind:
                for option in owned([s], *grads, degree):
                    _add(options, option)


def _forward(program: Program, chooser: Chooser, options: list[list[Option]], n: int, degree: int) -> None:
    node = program.nodes[n]
    for v in node.ins:
        made = program.values[v].made
        if made is None:
            continue
        for kind in {option.outs[made[1]]: None for option in options[made[0]]}:
            if not isinstance(kind, Shard) or not _special(kind):
                continue
            if kind.copies > 1:
                for option in copied(program, chooser, n, kind.copies, degree):
                    _add(options[n], option)
                continue
            for option in list(options[n]):
                for more in _in_parts(program, n, option, kind.parts):
                    if kind in more.ins:
                        _add(options[n], more)


def _prune(program: Program, options: list[list[Option]]) -> None:
    """Drop options that take a value in parts or with copies which no call makes so. Parameters can be cut anyhow."""
    changed = True
    while changed:
        changed = False
        for n, node in enumerate(program.nodes):
            kept = [option for option in options[n] if _made(program, options, node.ins, option)]
            if len(kept) < len(options[n]):
                options[n], changed = kept, True


def _made(program: Program, options: list[list[Option]], ins: list[int], option: Option) -> bool:
    for v, kind in zip(ins, option.ins, strict=True):
        value = program.values[v]
        if not _special(kind) or value.params:
            continue
        if value.made is None:
            return False
        n, o = value.made
        if not any(other.outs[o] == kind for other in options[n]):
            return False
    return True
