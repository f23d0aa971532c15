"""One axis of a program as a mixed-integer program, and what its solution says: kinds of parameters, options, moves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from meshplan.compiler.experts import INSIDE, law_of
from meshplan.compiler.kinds import I, Kind, P, R, replicated
from meshplan.cost.machine import FREE, Cost, Link, Machine
from meshplan.cost.work import block_flops, flops, touched
from meshplan.ops.experts.block import block_call
from meshplan.plan.placements import Shard
from meshplan.search.moves import move_cost
from meshplan.search.options import Option
from meshplan.search.program import Node, Program
from meshplan.search.solve import Problem, Solution

TRAINED = 3.0  # backward does twice the forward's work: one product for the input's gradient, one for the weight's


@dataclass(frozen=True)
class Limits:
    """What the choice is held to.

    Attributes:
        calls: nodes that must run whole.
        values: numbers of values that must be whole on every rank.
        barred: (value, kind) pairs that no value may have, such as a dim that a data axis splits.
        share: the part of a value that one data rank has.
        sequence: whether activations may be cut where no parameter cuts them: True, False, or None where it pays.
        bytes: parameter bytes of one rank at most; None for no bound.
        seconds_per_byte: what a step pays for each parameter byte a rank holds: its update, and its way over the data axes.
    """

    calls: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    barred: Callable[[int, Kind], bool] = field(default=lambda value, kind: False)
    share: Callable[[int], float] = field(default=lambda value: 1.0)
    sequence: bool | None = None
    bytes: float | None = None
    seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class Moved:
    """Value number `value` goes from `have` to `want`; `cost` for all that it stands for, both directions."""

    value: int
    have: Kind
    want: Kind
    cost: Cost


@dataclass(frozen=True)
class Choice:
    """A solution: kind by source value, option by node, the moves, modelled cost, parameter bytes a rank, proof, and what the
    limits said: nodes that run whole, values that are."""

    sources: dict[int, Kind]
    options: list[Option]
    moves: list[Moved]
    cost: Cost
    bytes: float
    seconds: float
    bound: float
    size: tuple[int, int]
    held: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()

    @property
    def gap(self) -> float:
        """How far the modelled seconds may be above the least, relative to them."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds > 0 else 0.0


class AxisProblem:
    """The program of one axis. Built once, solved with different bounds."""

    def __init__(
        self, program: Program, options: list[list[Option]], link: Link, machine: Machine, limits: Limits
    ) -> None:
        self.program, self.link, self.machine, self.limits = program, link, machine, limits
        self.options = [self._allowed(n, o) for n, o in enumerate(options)]
        self.problem = Problem()
        self.made: dict[int, dict[Kind, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.moved: dict[tuple[int, Kind, Kind], int] = {}
        self.x: list[list[list[int]]] = []  # by node and option: the columns that add up to 1 when it is taken
        self.followers: set[int] = set()
        self.y: dict[int, dict[Kind, int]] = {}
        self.costs: dict[int, Cost] = {}
        self.held: dict[int, float] = {}
        self._calls()
        self._sources()
        self._needs()

    def _allowed(self, n: int, options: list[Option]) -> list[Option]:
        node = self.program.nodes[n]
        if n in self.limits.calls or n in self.aside:
            return [o for o in options if all(map(replicated, (*o.ins, *o.outs)))]
        values = (*node.ins, *node.outs)
        kept = []
        for o in options:
            kinds = (*o.ins, *o.outs)
            if any(self.limits.barred(v, k) for v, k in zip(values, kinds, strict=True)):
                continue
            if any(isinstance(k, Shard) and not self._cuts(v, k) for v, k in zip(values, kinds, strict=True)):
                continue
            if self._partial_by_itself(node, o):
                continue
            if node.call.in_place and not _same_layout(o.ins[0], o.outs[0]):
                continue
            kept.append(o)
        return kept

    @cached_property
    def aside(self) -> set[int]:
        """Nodes that no parameter enters, directly or not: masks, positions, tables of angles. They run whole, as they cost
        next to nothing and whoever uses a part of them cuts it free of charge. Embedding lookups are none of them."""
        found: set[int] = set()
        for n, node in enumerate(self.program.nodes):
            values = [self.program.values[v] for v in node.ins]
            if all(
                not value.grad and not value.params and (value.made is None or value.made[0] in found)
                for value in values
            ):
                found.add(n)
        return found

    def _partial_by_itself(self, node: Node, option: Option) -> bool:
        """Whether nothing but replicated parameters, made partial, would make the result so: lowering never does that."""
        values = [self.program.values[v] for v in node.ins]
        made = [
            k
            for value, k in zip(values, option.ins, strict=True)
            if isinstance(k, Shard) or (k == P and not value.params)
        ]
        return P in option.ins and not made

    def _cuts(self, value: int, kind: Shard) -> bool:
        """Every rank gets something of the dim."""
        return self.program.values[value].tensor.shape[kind.dim] * kind.copies >= self.link.ranks

    def _calls(self) -> None:
        for n, node in enumerate(self.program.nodes):
            work = self._work(node) * node.weight
            follows = self._follows(n)
            if follows is None:
                costs = [Cost(work * option.share) + self._inner(node, option) for option in self.options[n]]
                taken = [[self._column(cost, True)] for cost in costs]
                self.problem.row({c: 1.0 for columns in taken for c in columns}, 1, 1)
            else:
                taken = follows
                self.followers.add(n)
                for option, columns in zip(self.options[n], taken, strict=True):
                    for c in columns:
                        self._adds(c, Cost(work * option.share))
            self.x.append(taken)
            for option, columns in zip(self.options[n], taken, strict=True):
                for o, (v, kind) in enumerate(zip(node.outs, option.outs, strict=True)):
                    if self.program.values[v].made == (n, o):
                        for c in columns:
                            self._makes(v, kind, c)

    def _follows(self, n: int) -> list[list[int]] | None:
        """Where node `n` takes one tensor that nothing else takes, and can take it as whatever its maker makes: the maker's
        columns, by option of `n`. A move before `n` is as good after it, where `n` makes nothing larger."""
        node = self.program.nodes[n]
        if len(node.ins) != 1 or len(node.outs) != 1 or node.call.in_place or n in self.limits.calls:
            return None
        value, made = self.program.values[node.ins[0]], self.program.values[node.outs[0]]
        if value.made is None or value.output or value.uses != [(n, 0)] or value.weight != node.weight:
            return None
        if node.ins[0] in self.twins or value.made[0] >= n or made.tensor.nbytes > value.tensor.nbytes:
            return None
        maker, o = value.made
        at = {option.ins[0]: i for i, option in enumerate(self.options[n])}
        if (
            len(at) != len(self.options[n])
            or made.grad != value.grad
            or any(option.replace for option in self.options[n])
        ):
            return None
        taken: list[list[int]] = [[] for _ in self.options[n]]
        for option, columns in zip(self.options[maker], self.x[maker], strict=True):
            if option.outs[o] not in at:
                return None
            taken[at[option.outs[o]]] += columns
        return taken

    def _adds(self, column: int, cost: Cost) -> None:
        self.costs[column] = self.costs[column] + cost
        self.problem.cost[column] += cost.seconds
        self.problem.bare[column] += cost.seconds - cost.latency

    def _makes(self, v: int, kind: Kind, column: int) -> None:
        self.made[v][kind].append(column)
        for w in self.twins.get(v, ()):
            self.made[w][kind].append(column)

    @cached_property
    def twins(self) -> dict[int, list[int]]:
        """Values that stand beside a made one: the same result of an equal layer, used elsewhere."""
        twins: dict[int, list[int]] = defaultdict(list)
        by_node = {(n, o): v for n, node in enumerate(self.program.nodes) for o, v in enumerate(node.outs)}
        for v, value in enumerate(self.program.values):
            if value.made is not None:
                own = by_node[value.made]
                if own != v:
                    twins[own].append(v)
        return twins

    def _column(self, cost: Cost, integral: bool) -> int:
        column = self.problem.column(cost.seconds, integral, cost.seconds - cost.latency)
        self.costs[column] = cost
        return column

    def _work(self, node: Node) -> float:
        """Modelled seconds of a whole call, forward and backward."""
        values = self.program.values
        ins, outs = [values[v].tensor for v in node.ins], [values[v].tensor for v in node.outs]
        args = tuple(x for x in node.call.leaves if isinstance(x, str))
        # Whatever dtype the example has, plans are for half precision on matrix units.
        work = flops(node.call.func, args, ins, outs)
        if node.call.func is block_call:
            work = block_flops(node.call.leaves[0], *law_of(node.call, self.program.trace))
        seconds = work / self.machine.flops
        seconds += touched(node.call.func, ins, outs) / self.machine.memory
        share = min(map(self.limits.share, node.outs), default=1.0)
        return share * seconds * (TRAINED if any(t.requires_grad for t in outs) else 1.0)

    def _inner(self, node: Node, option: Option) -> Cost:
        """What a semantic operator communicates inside."""
        if option.replace == "cross_entropy" and any(isinstance(k, Shard) and k.dim == 1 for k in option.ins[:1]):
            tokens = self.program.values[node.ins[1]].tensor.numel()
            # Maximum, sum of exponentials and the target's logit, in float32.
            return self._reduced(int(4 * tokens * self.limits.share(node.ins[1])), 3, node.weight)
        if option.replace == "split_norm" and isinstance(option.ins[0], Shard):
            x = self.program.values[node.ins[0]].tensor
            if option.ins[0].dim == x.dim() - 1:
                return self._reduced(int(8 * x[..., 0].numel() * self.limits.share(node.ins[0])), 2, node.weight)
        if option.replace == INSIDE:
            # The results are gathered, and in backward the gradients of the tokens.
            x = self.program.values[node.ins[0]].tensor
            return self.link.cost("all_gather", int(x.nbytes * self.limits.share(node.ins[0]))) * (2 * node.weight)
        return FREE

    def _reduced(self, nbytes: int, times: int, weight: int) -> Cost:
        return self.link.cost("all_reduce", nbytes) * (times * weight)

    def _sources(self) -> None:
        for v, value in enumerate(self.program.values):
            if value.made is not None:
                continue
            kinds: dict[Kind, None] = {I: None}
            if value.params:
                for n, j in value.uses:
                    kinds |= {o.ins[j]: None for o in self.options[n] if isinstance(o.ins[j], Shard)}
            self.y[v] = {}
            for kind in kinds:
                self.y[v][kind] = self._column(
                    Cost(self.limits.seconds_per_byte * self._bytes(v, kind)) if value.params else FREE, True
                )
                self.made[v][kind].append(self.y[v][kind])
                if value.params:
                    self.held[self.y[v][kind]] = self._bytes(v, kind)
            self.problem.row(dict.fromkeys(self.y[v].values(), 1.0), 1, 1)
        if self.limits.bytes is not None:
            self.bound(self.limits.bytes)

    @property
    def whole_bytes(self) -> float:
        """Bytes of all parameters."""
        return sum(self._bytes(v, I) for v, value in enumerate(self.program.values) if value.params)

    def bound(self, nbytes: float) -> None:
        """Let a rank hold at most so many bytes of parameters."""
        self.problem.row(dict(self.held), 0, nbytes)

    def _bytes(self, v: int, kind: Kind) -> float:
        value = self.program.values[v]
        whole = value.tensor.nbytes * value.weight
        return whole * kind.copies / self.link.ranks if isinstance(kind, Shard) else float(whole)

    def _needs(self) -> None:
        for v, value in enumerate(self.program.values):
            by_use: dict[Kind, list[list[int]]] = defaultdict(list)
            early: list[list[int]] = []
            for n, j in value.uses:
                takes: dict[Kind, list[int]] = defaultdict(list)
                late: list[int] = []
                pinned = self.program.nodes[n].call.in_place and j == 0
                for option, columns in zip(self.options[n], self.x[n], strict=True):
                    # Where a whole computation's gradients become partial makes no difference: not before the last of its calls.
                    if (
                        option.ins[j] == R
                        and not pinned
                        and not value.params
                        and option.share == 1.0
                        and option.outs[0] == R
                    ):
                        late += columns
                    else:
                        takes[option.ins[j]] += columns
                if n in self.followers:
                    continue  # takes it as it is made
                if late:
                    early.append(late)
                for kind, columns in takes.items():
                    if pinned:
                        self._need(v, kind, columns, {})
                    else:
                        by_use[kind].append(columns)
            if value.output:
                by_use[I].append([])
            if early:
                by_use.setdefault(R, [])
            for kind, uses in by_use.items():
                moves = self._moves(v, kind)
                for columns in uses:
                    self._need(v, kind, columns, moves)
                for columns in early if kind == R else ():
                    self._need(v, kind, columns, {have: c for have, c in moves.items() if have != I})
            if value.params and value.grad and I in by_use and R in by_use:
                self._one_ownership(v, by_use)

    def _need(self, v: int, kind: Kind, columns: list[int], moves: dict[Kind, int]) -> None:
        """One use of `v` as `kind` (the columns that take it so; none: always) asks for it to be made or moved so."""
        terms: dict[int, float] = defaultdict(float)
        for c in columns:
            terms[c] += 1.0
        for c in (*self.made[v].get(kind, ()), *moves.values()):
            terms[c] -= 1.0
        self.problem.row(dict(terms), -math.inf, 0.0 if columns else -1.0)

    def _moves(self, v: int, want: Kind) -> dict[Kind, int]:
        value = self.program.values[v]
        found: dict[Kind, int] = {}
        if self.limits.barred(v, want):
            return found
        for have, columns in self.made[v].items():
            if have == want:
                continue
            if self.limits.sequence is False and value.grad and isinstance(want, Shard) and not isinstance(have, Shard):
                continue  # nothing but a parameter may cut an activation
            cost = move_cost(
                value.tensor,
                have,
                want,
                self.link,
                bool(value.params),
                self.limits.sequence is not True,
                self.limits.share(v),
            )
            if cost is None:
                continue
            column = self._column(cost * value.weight, False)
            self.problem.row({column: 1.0, **dict.fromkeys(columns, -1.0)}, -math.inf, 0.0)
            found[have] = column
            self.moved[v, have, want] = column
        return found

    def _one_ownership(self, v: int, by_use: dict[Kind, list[list[int]]]) -> None:
        """A parameter whose gradient is whole in one use and partial in another is refused later: keep to one of them."""
        flag = self.problem.column(0.0, True)
        self.costs[flag] = FREE
        for kind, sign in ((I, 1.0), (R, -1.0)):
            for columns in by_use[kind]:
                self.problem.row({**dict.fromkeys(columns, 1.0), flag: sign}, -math.inf, 1.0 if sign > 0 else 0.0)

    def least_bytes(self, seconds: float, gap: float) -> float:
        """The least parameter bytes that one rank can hold."""
        cost = self.problem.cost
        self.problem.cost = [self.held.get(c, 0.0) for c in range(len(cost))]
        try:
            return self.problem.solve(seconds, gap).objective
        finally:
            self.problem.cost = cost

    def solve(self, seconds: float, gap: float) -> Choice:
        found = self.problem.best(seconds, gap)
        options = [self.options[n][self._taken_option(found, n)] for n in range(len(self.program.nodes))]
        sources = {v: list(kinds)[self._chosen(found, list(kinds.values()))] for v, kinds in self.y.items()}
        moves = self._taken(options, sources)
        total = FREE
        for column, cost in self.costs.items():
            if found.on(column):
                total = total + cost
        held = sum(nbytes for column, nbytes in self.held.items() if found.on(column))
        size = (found.rows, found.columns)
        limits = self.limits
        return Choice(
            sources, options, moves, total, held, found.objective, found.bound, size, limits.calls, limits.values
        )

    def _taken(self, options: list[Option], sources: dict[int, Kind]) -> list[Moved]:
        """The moves that some call asks for; the solver may set one that costs nothing where nobody does."""
        moves = {}
        for v, value in enumerate(self.program.values):
            have = sources[v] if value.made is None else options[value.made[0]].outs[value.made[1]]
            wanted = {options[n].ins[j]: None for n, j in value.uses} | ({I: None} if value.output else {})
            for want in wanted:
                if want != have and (v, have, want) in self.moved:
                    moves[v, have, want] = Moved(v, have, want, self.costs[self.moved[v, have, want]])
        return list(moves.values())

    def _taken_option(self, found: Solution, n: int) -> int:
        sums = [sum(found.values[c] for c in columns) for columns in self.x[n]]
        return max(range(len(sums)), key=sums.__getitem__)

    def _chosen(self, found: Solution, columns: list[int]) -> int:
        return max(range(len(columns)), key=lambda i: found.values[columns[i]])


def _same_layout(a: Kind, b: Kind) -> bool:
    return a == b or (replicated(a) and replicated(b))
