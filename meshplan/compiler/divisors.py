"""Divisibility: which sizes each axis of a program divides, and the conditions that its symbolic counts rest on."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from meshplan.compiler.commgraph import fsdp_of
from meshplan.compiler.fitting import Point
from meshplan.compiler.probes import BATCH, SEQUENCE, Prober
from meshplan.mesh.spec import DATA_AXES

Divided = dict[str, list[int | str]]
"""By axes joined by `*`: the numbers, and the variables `b` and `s`, that they divide."""


def divided(prober: Prober, base: Point) -> Divided:
    """What each axis has to divide: dims of parameters, and `b` and `s` of inputs and activations, seen at `base`.

    Sizes that an axis does not divide now are cut unevenly, by the program or by FSDP's padding, and do not count.
    """
    core, found = prober.core, Divided()
    degree = core.spec.degree
    for plan in core.params.values():
        for axis, shard in plan.shards:
            cut = shard.parts or (plan.shape[shard.dim],)
            found.setdefault(axis, []).extend(n for n in cut if n % degree(axis) == 0)
    for leaf in (leaf for e in core.examples.values() for leaf in e.leaves):
        for d, role in enumerate(prober.roles.get(leaf.key, ())):
            axes = [a for a, k in zip(core.program.axes, leaf.kinds, strict=True) if getattr(k, "dim", None) == d]
            if role and axes:
                found.setdefault("*".join(axes), []).append(role)
    probe = prober.at(base)
    for move in (b.move for b in probe.core.program.boundaries) if probe else ():
        if "S" not in (move.src, move.dst) or move.axis in DATA_AXES or move.size % degree(move.axis):
            continue
        if move.size == base.get(SEQUENCE):
            found.setdefault(move.axis, []).append(SEQUENCE)
        elif move.size % base.get(BATCH, move.size + 1):  # not batch times something, hence a size of the model
            found.setdefault(move.axis, []).append(move.size)
    units, policy = fsdp_of(prober.model, core)
    shards = "*".join(a for a in ("dp_shard", "cp") if degree(a) > 1)
    for p in (p for u in units if not u.shard for p in u.params):
        if policy and policy.shard > 1 and p.local_shape[p.shard_dim] % policy.shard == 0:
            found.setdefault(shards, []).append(p.local_shape[p.shard_dim])
    return {axes: sizes for axes, sizes in found.items() if sizes}


def conditions(
    held: Divided, base: Point, here: Point, tried: Mapping[str, tuple[list[int], list[int]]], checked: bool
) -> tuple[str, ...]:
    """The conditions as text: divisibility, and the values of each variable at which this is the program.

    Arguments:
        tried: for each variable, other values that gave the same collectives, and others that did not.
        checked: whether a point off all lines was looked at.
    """
    out = []
    for axes, sizes in held.items():
        numbers = sorted({s for s in sizes if isinstance(s, int)})
        texts = sorted({s for s in sizes if isinstance(s, str)})
        if numbers:
            of = f" (all of {', '.join(map(str, numbers))})" if len(numbers) > 1 else ""
            texts.append(f"{gcd(*numbers)}{of}")
        out += [f"{axes} divides {text}" for text in texts]
    for name, (good, bad) in tried.items():
        values = ", ".join(map(str, sorted({base[name], here[name], *good})))
        other = f"; another program, or none, at {', '.join(map(str, bad))}" if bad else ""
        out.append(f"{name} fitted at {values}{other}" if good else f"{name} = {here[name]}{other}")
    if not checked:
        out.append("no point off the fitted lines could be lowered: products of powers are assumed")
    return tuple(out)
