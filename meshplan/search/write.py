"""From a solution to rules a person can read: parameters by module, layouts where values are moved, each with its reason."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from meshplan.compiler.kinds import Kind, P, replicated, user_letter
from meshplan.plan.patterns import generic
from meshplan.plan.placements import Partial, Placement, Replicate, Shard
from meshplan.plan.rules import Rule
from meshplan.report.units import bytes_text
from meshplan.search.axis import Choice, Moved
from meshplan.search.paths import grouped, pattern_of
from meshplan.search.program import Program, equals


@dataclass
class Said:
    """What a rule will say of one module: placements by parameter, and by input and output key."""

    params: dict[str, Placement]
    input: dict[str, Placement]
    output: dict[str, Placement]
    notes: list[str]

    def key(self) -> tuple[object, ...]:
        return (tuple(self.params.items()), tuple(self.input.items()), tuple(self.output.items()))


def rules_of(program: Program, choice: Choice, model: nn.Module, axis: str, gathers: bool) -> tuple[Rule, ...]:
    """The rules on `axis` that lead lowering to `choice`.

    Arguments:
        gathers: also pin the inputs at which sharded values are gathered; without, the operations ask for that themselves.
    """
    names = [name for name, _ in model.named_modules()]
    order = {name: i for i, name in enumerate(names)}
    said: dict[str, Said] = defaultdict(lambda: Said({}, {}, {}, []))
    for v, kind in choice.sources.items():
        value = program.values[v]
        if value.params and isinstance(kind, Shard):
            for name in value.params:
                module, _, param = name.rpartition(".")
                said[module].params[param] = Shard(kind.dim, kind.parts)
    where = Boundaries(program)
    for path, side, key in (at for v in sorted(choice.whole) for at in where.of(v)):
        for one in equals(path, program.repeats):
            table = said[one].output if side == "output" else said[one].input
            table.setdefault(key, Replicate())
            said[one].notes.append(f"whole on {axis}")
    for moved in choice.moves:
        for path, side, key, place in where.hosts(moved, gathers, choice):
            for one in equals(path, program.repeats):
                table = said[one].output if side == "output" else said[one].input
                table.setdefault(key, place)
                said[one].notes.append(_why(moved, axis))
    for path, key in where.left_partial(choice, set(said)):
        for one in equals(path, program.repeats):
            if not said[one].output:
                said[one].output[key] = Partial()
                said[one].notes.append(f"left P on {axis}: summed with what follows")
    by_said: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for path in sorted(said, key=lambda p: order.get(p, 0)):
        by_said[said[path].key()].append(path)
    rules = []
    for paths in by_said.values():
        templates: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            templates[generic(path)].append(path)
        patterns = {pattern_of(members, names): members for members in templates.values()}
        for pattern, parts in grouped(list(patterns)):
            members = [path for part in parts for path in patterns[part]]
            words = said[members[0]]
            rules.append(
                Rule(
                    pattern,
                    params={name: {axis: place} for name, place in words.params.items()},
                    input={key: {axis: place} for key, place in words.input.items()},
                    output={key: {axis: place} for key, place in words.output.items()},
                    note=_note(model, members, words),
                )
            )
    return tuple(rules)


def _why(moved: Moved, axis: str) -> str:
    return f"{user_letter(moved.have)} -> {user_letter(moved.want)} {axis}"


def _note(model: nn.Module, paths: list[str], said: Said) -> str:
    """What the rule saves, in bytes of the example's dtype."""
    parts = []
    if said.params:
        held = sum(model.get_submodule(path).get_parameter(name).nbytes for path in paths for name in said.params)
        parts.append(f"{bytes_text(held)} of parameters split")
    if said.output or said.input:
        parts.append(", ".join(dict.fromkeys(said.notes)))
    return "; ".join(parts)


class Boundaries:
    """Which module boundary a value of the program crosses."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.left: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        self.entered: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for path, outs in program.trace.left:
            for key, v in outs:
                self.left[v].append((path, key, len(outs)))
        for (path, values), keys in zip(program.trace.entered, program.trace.keys, strict=True):
            for v, key in zip(values, keys, strict=True):
                self.entered[v].append((path, key))
        # By module, side and key: the values that cross there, in all calls of the module.
        self.crossing: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        for v, value in enumerate(program.values):
            for number in value.numbers:
                for path, key, _ in self.left[number]:
                    self.crossing[path, "output", key].add(v)
                for path, key in self.entered[number]:
                    self.crossing[path, "input", key].add(v)

    def left_partial(self, choice: Choice, owners: set[str]) -> list[tuple[str, str]]:
        """(module, output key) of partial sums that leave the module of a split parameter as they are; else they would be
        summed where they were made."""
        moved = {m.value for m in choice.moves if m.have == P and len(self.program.values[m.value].uses) < 2}
        found = []
        for v, value in enumerate(self.program.values):
            if value.made is None or choice.options[value.made[0]].outs[value.made[1]] != P or v in moved:
                continue
            for path, key, many in self.left[value.numbers[0]]:
                if path in owners:
                    found.append((path, key if many > 1 else ""))
        return found

    def hosts(self, moved: Moved, gathers: bool, choice: Choice) -> list[tuple[str, str, str, Placement]]:
        """(module, side, key, placement) that declare `moved`; none where operations ask for it by themselves."""
        value = self.program.values[moved.value]
        if value.params or (not value.grad and not self._alone(moved, choice)):
            return []  # operations beside a shard cut these by themselves
        cut = isinstance(moved.want, Shard)
        # What was held to run whole may well accept a shard: it has to be handed the whole.
        held = {n for n, _ in value.uses} & choice.held
        if not cut and not gathers and not held:
            return []
        place = _placement(moved.want)
        for number in value.numbers:
            leaves_whole = held and all(replicated(choice.options[n].ins[j]) for n, j in value.uses)
            if self.left[number] and (leaves_whole or not isinstance(moved.have, Shard)):
                path, key, many = self.left[number][0]
                if path and self._in_every_call(path, "output", key, moved, choice):
                    return [(path, "output", key if many > 1 else "", place)]
            if self.entered[number]:
                uses = {self.program.nodes[n].call.module for n, _ in value.uses}
                for path, key in self.entered[number]:
                    used = any(u == path or u.startswith(f"{path}.") for u in uses)
                    if path and used and self._in_every_call(path, "input", key, moved, choice):
                        return [(path, "input", key, place)]
        return []

    def of(self, v: int) -> list[tuple[str, str, str]]:
        """(module, side, key) of the outermost boundary that value number `v` crosses on its way to a call that takes it, else
        of the one that it leaves."""
        value = self.program.values[v]
        users = [self.program.nodes[n].call.module for n, _ in value.uses]
        for number in value.numbers:
            for path, key in self.entered[number]:
                if path and any(u == path or u.startswith(f"{path}.") for u in users):
                    return [(path, "input", key)]
            for path, key, many in self.left[number]:
                if path:
                    return [(path, "output", key if many > 1 else "")]
        return []

    def _in_every_call(self, path: str, side: str, key: str, moved: Moved, choice: Choice) -> bool:
        """Whether all that crosses there moves so: a module that is called several times has one set of boundaries."""
        others = self.crossing[path, side, key] - {moved.value}
        return others <= {m.value for m in choice.moves if m.want == moved.want and others}

    def _alone(self, moved: Moved, choice: Choice) -> bool:
        """Whether some call is split by nothing but this move."""
        for n, j in self.program.values[moved.value].uses:
            ins = choice.options[n].ins
            if ins[j] == moved.want and all(replicated(k) for i, k in enumerate(ins) if i != j):
                return True
        return False


def _placement(kind: Kind) -> Placement:
    if isinstance(kind, Shard):
        return Shard(kind.dim)
    assert replicated(kind)
    return Replicate()
