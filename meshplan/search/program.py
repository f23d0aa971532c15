"""The single-device program as the planner sees it: each distinct layer once, with how many layers it stands for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.capture import Call, Ref, Trace
from meshplan.compiler.repeats import moved_path


@dataclass
class Value:
    """One value, or equal values of equal layers.

    Attributes:
        numbers: their ids in the trace.
        tensor: fake, at global shape.
        made: the call it is a result of, by number, and which result; None for parameters, buffers, inputs and constants.
        uses: calls that take it, and as which of their tensors.
        weight: how many values this one stands for.
        params: names of the parameters it is; empty for others.
        input: the model's input it is, or "".
        output: whether the model returns it.
    """

    numbers: tuple[int, ...]
    tensor: Tensor
    made: tuple[int, int] | None = None
    uses: list[tuple[int, int]] = field(default_factory=list)
    weight: int = 1
    params: tuple[str, ...] = ()
    input: str = ""
    output: bool = False

    @property
    def grad(self) -> bool:
        return self.tensor.requires_grad


@dataclass
class Node:
    """One call with the values it takes and makes (numbers into `Program.values`), and how many calls it stands for."""

    call: Call
    ins: list[int]
    outs: list[int]
    weight: int


@dataclass
class Program:
    """Calls and values of the distinct layers; `trace` is what they were read from."""

    trace: Trace
    nodes: list[Node]
    values: list[Value]
    repeats: dict[str, tuple[str, ...]]


def program_of(trace: Trace, model: nn.Module, param_names: list[str], inputs: Iterable[tuple[str, int]]) -> Program:
    """Read `trace` (captured with equal layers once).

    Arguments:
        param_names: names of the skeleton's parameters, in the order in which capture numbered them from 0.
        inputs: (key, number) of the model's input tensors.
    """
    handed = _handed(trace)
    uses = _uses(trace, handed)
    weights = _weights(trace)
    named = {number: (name,) for number, name in enumerate(param_names)} | _filled(trace, model)
    paths = _repeats(trace)
    named = {number: _alike(names, paths, model) for number, names in named.items()}
    given = {number: key for key, number in inputs}
    makers: dict[int, tuple[int, int]] = {}
    kept = [call for call in trace.calls if not _idle(call, trace)]
    place = {call.index: i for i, call in enumerate(kept)}
    for call in kept:
        for o, v in enumerate(call.outs):
            if v not in call.ins:
                makers.setdefault(v, (place[call.index], o))
    copies = _copies(trace, handed)
    originals = set(copies.values())  # their equals in the other layers are values of their own
    returned = {leaf.value for leaf in trace.outputs[0] if isinstance(leaf, Ref)}
    values: list[Value] = []
    at: dict[int, int] = {}
    merged: dict[object, int] = {}
    wanted = {v for call in kept for v in (*call.ins, *call.outs)} | set(copies) | returned
    for number in sorted(wanted):
        t = trace.values[number]
        made = makers.get(copies.get(number, number))
        used = sorted({(place[c], j) for c, j in uses.get(number, ()) if c in place})
        key = (made, tuple(used), number in returned) if number in copies else number
        if key in merged:
            old = values[merged[key]]
            old.numbers, old.weight = (*old.numbers, number), old.weight + 1
            at[number] = merged[key]
            continue
        merged[key] = at[number] = len(values)
        params = named.get(number, ())
        weight = len(params) or 1
        if made is not None and number not in copies and number not in originals and not params:
            weight = weights[kept[made[0]].index]
        values.append(
            Value(
                (number,),
                t,
                made,
                used,
                weight,
                params,
                given.get(number, ""),
                number in returned,
            )
        )
    nodes = [Node(c, [at[v] for v in c.ins], [at[v] for v in c.outs], weights[c.index]) for c in kept]
    return Program(trace, nodes, values, paths)


def _idle(call: Call, trace: Trace) -> bool:
    """Whether a call only makes constants, or returns what it was handed (a cast to the same dtype, dropout in evaluation)."""
    if set(call.outs) <= set(call.ins):
        return True
    return not any(compat.is_fake(trace.values[v]) for v in (*call.ins, *call.outs))


def _filled(trace: Trace, model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Names of the parameters of hollow modules that were filled to be traced."""
    out: dict[int, tuple[str, ...]] = {}
    for g in trace.grouped:
        if g.of is None and g.first_value >= 0:
            module = model.get_submodule(g.path)
            for k, (name, _) in enumerate(module.named_parameters()):
                out[g.first_value + k] = (f"{g.path}.{name}",)
    return out


def _repeats(trace: Trace) -> dict[str, tuple[str, ...]]:
    """By path of a traced module: the paths it stands for, its own first."""
    first = {number: g.path for number, g in enumerate(trace.grouped)}
    out: dict[str, list[str]] = defaultdict(list)
    for g in trace.grouped:
        if g.of is not None and g.path not in out[first[g.of]] and g.path != first[g.of]:
            out[first[g.of]].append(g.path)
    return {path: (path, *others) for path, others in out.items() if others}


def _alike(names: tuple[str, ...], paths: dict[str, tuple[str, ...]], model: nn.Module) -> tuple[str, ...]:
    """`names` with the names that the same parameter has in the equals of its layers; a tied one counts once."""
    seen: dict[int, str] = {}
    for name in (equal for one in names for equal in equals(one, paths)):
        seen.setdefault(id(model.get_parameter(name)), name)
    return tuple(seen.values())


def equals(path: str, repeats: Mapping[str, tuple[str, ...]]) -> list[str]:
    """`path`, of a module or a parameter, and the same one in the layers that its layer stands for."""
    found = [path]
    for one in found:
        for first, others in repeats.items():
            moved = (moved_path(one, first, other) for other in others[1:])
            found += [p for p in moved if p is not None and p not in found]
    return found


def _weights(trace: Trace) -> dict[int, int]:
    """By call: how many calls of the whole model it stands for."""
    number_of = list(enumerate(trace.grouped))
    times: dict[int, int] = {}

    def enclosing(path: str, at: int, but: int) -> int:
        """The number of the innermost traced module call that holds a call made at `at`; -1 for none."""
        best, length = -1, -1
        for n, g in number_of:
            if n == but or g.of is not None or len(g.path) <= length or not g.at <= at < max(trace.ends[n], g.at + 1):
                continue
            if path == g.path or path.startswith(f"{g.path}."):
                best, length = n, len(g.path)
        return best

    def of(n: int) -> int:
        if n < 0:
            return 1
        if n not in times:
            times[n] = 0
            members = [(m, g) for m, g in number_of if m == n or g.of == n]
            times[n] = sum(of(enclosing(g.path.rpartition(".")[0], g.at, m)) for m, g in members)
        return times[n]

    return {c.index: of(enclosing(c.module, c.index, -1)) for c in trace.calls}


def _handed(trace: Trace) -> list[tuple[int, ...]]:
    """For each grouped call, in order, the values its module was handed."""
    by_path: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for path, values in trace.entered:
        by_path[path].append(values)
    seen: dict[str, int] = defaultdict(int)
    out = []
    for g in trace.grouped:
        out.append(by_path[g.path][seen[g.path]])
        seen[g.path] += 1
    return out


def _uses(trace: Trace, handed: list[tuple[int, ...]]) -> dict[int, set[tuple[int, int]]]:
    """By value: the calls (index, which tensor) that take it, in its own layer or in those that a traced one stands for."""
    placed: dict[int, set[tuple[int, int, int]]] = defaultdict(set)  # (where in the trace, call, tensor)
    for call in trace.calls:
        for j, v in enumerate(call.ins):
            placed[v].add((call.index, call.index, j))
    standing = [(g, handed[n]) for n, g in enumerate(trace.grouped) if g.of is not None]
    for g, values in sorted(standing, key=lambda item: -item[0].path.count(".")):
        first = trace.grouped[g.of]  # type: ignore[index]
        for old, new in zip(handed[g.of], values, strict=True):  # type: ignore[index]
            if old != new:
                inside = {(c, j) for at, c, j in placed[old] if first.at <= at < trace.ends[g.of]}  # type: ignore[index]
                placed[new] |= {(g.at, c, j) for c, j in inside}
    return {v: {(c, j) for _, c, j in found} for v, found in placed.items()}


def _copies(trace: Trace, handed: list[tuple[int, ...]]) -> dict[int, int]:
    """Values that a repeated layer returned, by the value that the traced one returned in their place."""
    outs: dict[int, tuple[int, ...]] = {}
    left: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for path, made in trace.left:
        left[path].append(tuple(v for _, v in made))
    seen: dict[str, int] = defaultdict(int)
    out: dict[int, int] = {}
    for n, g in enumerate(trace.grouped):
        own = left[g.path][seen[g.path]]
        seen[g.path] += 1
        if g.of is None:
            outs[n] = own
            continue
        for old, new in zip(outs[g.of], own, strict=True):
            if old != new and new not in handed[n]:
                out[new] = out.get(old, old)
    return out
