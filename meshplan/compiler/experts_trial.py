"""What a block of experts returns, found by running it with numbers; one that could not run on a rank's own tokens is refused.

The block runs on tokens of two shapes: random ones, then each of them by itself; and equal ones, which its router sends to the
same experts, then in two parts, whose rows the experts compute together. All that it returns has to be the same, for each token.
How shapes of results follow those of tokens is read off the two runs. Parameters of any size are made of one array of numbers:
number i of them begins i places on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler.experts_kind import PLAIN
from meshplan.ops.experts.block import TENSOR, Dim, Law, Made, tokens_of
from meshplan.ops.experts.replay import Buffers, Replay, contract

RANDOM, EQUAL = (2, 3, 2), (3, 5, 4)
"""Leading sizes of the tokens; the last of them are used. No two ranges of dims have the same two products."""
FEW, MANY = 6, 15
"""The same for tokens [T, H]."""
ALLOWED = 1e-5
"""Largest relative distance: routers compute in float32 whatever the dtype of the model."""


@dataclass(frozen=True)
class _Ran:
    """What a run returned: tensors, other leaves, structure, and what it added to each buffer."""

    made: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    structure: Any
    added: Mapping[str, Tensor]


class Trial:
    """One block, `module`, with made-up parameters of `dtype`, that is called with arguments like `leaves`."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        each: tuple[str, ...],
        leaves: Sequence[Any],
        structure: Any,
        dtype: torch.dtype,
    ) -> None:
        self.path, self.each, self.structure, self.dtype = path, each, structure, dtype
        self.module = made_up(module, dtype)
        self.experts = [self.module.get_submodule(name) for name in each]
        self.generator = torch.Generator().manual_seed(0)
        self.main = tokens_of(leaves, path)
        self.leaves = list(leaves)
        n = self.main.dim() - 1
        self.sizes = ((FEW,), (MANY,)) if n == 1 else (RANDOM[:n], EQUAL[:n])
        if n > len(RANDOM):
            raise contract(path, f"its tokens have {n} dims")

    def law(self) -> Law:
        """Raises PlanError `experts-contract`."""
        runs = []
        replays: list[Replay] = []
        for lead, equal in zip(self.sizes, (False, True), strict=True):
            given = self._tokens(lead, equal)
            whole = self._whole(given, replays)
            runs.append((lead, given, whole))
        (few, _, first), (many, _, second) = runs
        if (first.leaves, first.structure) != (second.leaves, second.structure) or not first.made:
            raise contract(self.path, "what it returns beside tensors differs from call to call")
        dims = [self._dims(a, b, few, many) for a, b in zip(first.made, second.made, strict=True)]
        grads, routed = self._gradients(runs[0][1])
        made = tuple(
            Made(d, None if t.dtype == self.dtype else t.dtype, g, r)
            for d, t, g, r in zip(dims, first.made, grads, routed, strict=True)
        )
        self._in_parts(made, runs[0], list(product(*(_ones(n) for n in few))))
        self._in_parts(made, runs[1], [(slice(0, 1),), (slice(1, None),)])
        summed, counted = self._buffers(made, runs)
        width, rows, idle = self._calls(replays, few)
        return Law(made, first.leaves, first.structure, width, rows, idle, summed, counted)

    def _tokens(self, lead: tuple[int, ...], equal: bool) -> list[Any]:
        """The leaves of a call with tokens of these leading sizes, which are all `equal` or not."""
        n, found = self.main.dim() - 1, []
        for x in self.leaves:
            if not isinstance(x, Tensor):
                found.append(x)
                continue
            shape = (*((1,) * n if equal else lead), *x.shape[n:])
            if x.is_floating_point():
                t = torch.randn(shape, generator=self.generator, dtype=self.dtype)
            else:
                t = torch.randint(0, 2, shape, generator=self.generator).to(x.dtype)
            found.append(t.expand(*lead, *x.shape[n:]).clone())
        return found

    def _call(self, given: Sequence[Any]) -> Any:
        args, kwargs = compat.unflatten(list(given), self.structure)
        return self.module.forward(*args, **kwargs)

    @torch.no_grad()
    def _whole(self, given: Sequence[Any], replays: list[Replay]) -> _Ran:
        """One call as on one device, and what else it does."""
        held, random = _kept(self.module), torch.get_rng_state()
        buffers = self._all_buffers()
        versions = [x._version for x in given if isinstance(x, Tensor)]
        with _Foreign(self.path):
            ran = self._ran(self._call(given), buffers)
        if [x._version for x in given if isinstance(x, Tensor)] != versions:
            raise contract(self.path, "it writes into its arguments")
        if not torch.equal(torch.get_rng_state(), random):
            raise contract(self.path, "it draws random numbers")
        if _kept(self.module) != held:
            changed = sorted({name for name, _ in _kept(self.module) ^ held})
            raise contract(
                self.path, f"it keeps {', '.join(changed)} from one call to the next, which is this rank's alone"
            )
        replay = Replay(self.experts, self.path)
        replay.first(partial(self._call, given))
        buffers.put_back()
        replays.append(replay)
        return ran

    def _all_buffers(self) -> Buffers:
        return Buffers(self.module, [name for name, _ in self.module.named_buffers()])

    def _ran(self, out: Any, buffers: Buffers) -> _Ran:
        names = [name for name, _ in self.module.named_buffers()]
        added = dict(zip(names, buffers.added(), strict=True))
        buffers.put_back()
        leaves, structure = compat.flatten(out)
        made = tuple(x.clone() for x in leaves if isinstance(x, Tensor))
        rest = tuple(TENSOR if isinstance(x, Tensor) else x for x in leaves)
        return _Ran(made, rest, structure, added)

    def _dims(self, a: Tensor, b: Tensor, few: tuple[int, ...], many: tuple[int, ...]) -> tuple[Dim, ...]:
        """How the shape of a result follows from that of the tokens, of what two runs made."""
        n = len(few)
        ranges = {(math.prod(few[i:j]), math.prod(many[i:j])): (i, j) for i in range(n) for j in range(i + 1, n + 1)}
        pairs = list(zip(a.shape, b.shape, strict=False))
        found: list[Dim] = [s if s == t else ranges.get((s, t), (-1, -1)) for s, t in pairs]
        along = [d for d in found if isinstance(d, tuple)]
        ends = [0, *(j for _, j in along)]
        if a.dim() != b.dim() or not along or [i for i, _ in along] != ends[:-1] or ends[-1] != n:
            raise contract(
                self.path,
                f"it returns {list(a.shape)} for tokens {[*few, self.main.shape[-1]]}, and {list(b.shape)} for "
                f"{[*many, self.main.shape[-1]]}: no entry for each token in order (a loss of all tokens is taken outside, of "
                "what the block returns for each)",
            )
        return tuple(found)

    def _gradients(self, given: list[Any]) -> tuple[list[bool], list[bool]]:
        """For each result whether it has a gradient, and whether experts give it one.

        Raises PlanError `experts-contract` where experts run in a checkpoint or with gradients off: who runs them in backward?"""
        buffers = self._all_buffers()
        every = [p for p in self.module.parameters() if p.is_floating_point()]
        inside = {id(p) for e in self.experts for p in e.parameters()}
        found = []
        try:
            for chosen in (every, [p for p in every if id(p) in inside]):
                for p in chosen:
                    p.requires_grad_()
                leaves = [
                    x.clone().requires_grad_()
                    if chosen is every and isinstance(x, Tensor) and x.is_floating_point()
                    else x
                    for x in given
                ]
                out = [x for x in compat.flatten(self._call(leaves))[0] if isinstance(x, Tensor)]
                found.append([t.requires_grad for t in out])
                replay = Replay(self.experts, self.path)
                replay.first(partial(self._call, leaves))
                if replay.hidden:
                    raise contract(self.path, "its experts run in a checkpoint of its own, or with gradients off")
                for p in every:
                    p.requires_grad_(False)
        finally:
            buffers.put_back()
        return found[0], found[1]

    @torch.no_grad()
    def _in_parts(
        self, made: Sequence[Made], run: tuple[Any, list[Any], _Ran], parts: Sequence[tuple[slice, ...]]
    ) -> None:
        """Run the tokens in `parts`, as many ranks would, and compare what they return and count."""
        lead, given, whole = run
        cut = [[x[part] if isinstance(x, Tensor) else x for x in given] for part in parts]
        ran = self._as_ranks(cut)
        for number, (m, t) in enumerate(zip(made, whole.made, strict=True)):
            for part, piece in zip(parts, ran, strict=True):
                every = [*part, *[slice(None)] * (len(lead) - len(part))]
                sizes = [len(range(n)[s]) for n, s in zip(lead, every, strict=True)]
                place = [slice(None)] * len(m.apart(lead))
                for d, s in enumerate(every):
                    place[m.place(d)] = s
                want = t.reshape(m.apart(lead))[tuple(place)]
                have = piece.made[number]
                if tuple(have.shape) != m.shape(sizes):
                    raise contract(
                        self.path, f"it returns {list(have.shape)} for tokens {[*sizes, self.main.shape[-1]]}"
                    )
                distance = _apart(have.reshape(want.shape), want, t)
                if not distance <= ALLOWED:
                    raise contract(
                        self.path, f"a token by itself gives another result, relative distance {distance:.1e}"
                    )
        for piece in ran:
            if (piece.leaves, piece.structure) != (whole.leaves, whole.structure):
                raise contract(self.path, "what it returns beside tensors depends on the tokens")
        for name, delta in whole.added.items():
            total = sum(piece.added[name] for piece in ran)
            if not (_same(total, delta) or all(_same(piece.added[name], delta) for piece in ran)):
                raise contract(self.path, f"what it does to its buffer {name} is no sum over tokens")

    def _as_ranks(self, cut: Sequence[list[Any]]) -> list[_Ran]:
        """What the block returns for each part, its experts having computed the rows of all of them together."""
        buffers = self._all_buffers()
        if not self.experts:
            return [self._ran(self._call(part), buffers) for part in cut]
        replays = [Replay(self.experts, self.path) for _ in cut]
        for replay, part in zip(replays, cut, strict=True):
            replay.first(partial(self._call, part))
            buffers.put_back()
        noted = [(replay.rows(), replay.numbers) for replay in replays]
        results = [None if rows is None else torch.empty_like(rows) for rows, _ in noted]
        for number, expert in enumerate(self.experts):
            places = [torch.tensor([n == number for n in numbers], dtype=torch.bool) for _, numbers in noted]
            rows = [rows[at] for (rows, _), at in zip(noted, places, strict=True) if rows is not None]
            if not sum(len(x) for x in rows):
                continue
            made = expert(torch.cat(rows))
            if not isinstance(made, Tensor) or made.shape != torch.cat(rows).shape:
                raise contract(self.path, "an expert does not make a row [H] of each row [H]")
            left = iter(made.split([len(x) for x in rows]))
            for out, at in zip(results, places, strict=True):
                if out is not None:
                    out[at] = next(left)
        ran = []
        for replay, part, out in zip(replays, cut, results, strict=True):
            answer = torch.zeros((0, 1), dtype=self.dtype) if out is None else out
            ran.append(self._ran(replay.second(partial(self._call, part), answer), buffers))
        return ran

    def _buffers(
        self, made: Sequence[Made], runs: Sequence[tuple[Any, list[Any], _Ran]]
    ) -> tuple[tuple[str, ...], tuple[tuple[str, Tensor], ...]]:
        """Buffers that count tokens, and those to which any call adds the same."""
        (_, few, a), (_, _, b) = runs
        single = [x[(slice(0, 1),) * (self.main.dim() - 1)] if isinstance(x, Tensor) else x for x in few]
        with torch.no_grad():
            one = self._as_ranks([single])[0]
        changed = [name for name in a.added if a.added[name].any() or b.added[name].any()]
        counted = [
            name for name in changed if _same(a.added[name], b.added[name]) and _same(a.added[name], one.added[name])
        ]
        return tuple(n for n in changed if n not in counted), tuple((n, a.added[n]) for n in counted)

    def _calls(self, replays: Sequence[Replay], few: tuple[int, ...]) -> tuple[int, int, bool]:
        """Width of the rows of experts, how many there are for each token, and whether experts without rows are called."""
        if not self.experts:
            return 0, 0, False
        idle = []
        for replay in replays:
            without = set(range(len(self.experts))) - set(replay.numbers)
            idle += [e in replay.called for e in without]
        rows = replays[0].rows()
        if rows is None:
            raise contract(self.path, f"it does not call {self.each[0]} and the others, one by one")
        if any(idle) and not all(idle):
            raise contract(self.path, "it calls some experts without a row, and others not")
        if rows.dtype != self.dtype:
            raise contract(self.path, f"its experts are called with rows {rows.dtype} of tokens {self.dtype}")
        return rows.shape[1], max(1, round(rows.shape[0] / math.prod(few))), bool(idle) and all(idle)


def _ones(n: int) -> Iterator[slice]:
    return (slice(a, b) for a, b in pairwise(range(n + 1)))


def _same(a: Any, b: Tensor) -> bool:
    return bool(torch.allclose(torch.as_tensor(a).double(), b.double(), rtol=ALLOWED, atol=1e-12))


def _apart(a: Tensor, b: Tensor, whole: Tensor) -> float:
    """Distance of two results over the largest number of the whole one; infinite between integers that differ."""
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return ((a - b).abs().max() / whole.abs().max()).item()


def _kept(module: nn.Module) -> set[tuple[str, Any]]:
    """What the modules hold beside parameters, buffers and children, to be compared before and after a call."""
    found: set[tuple[str, Any]] = set()
    for path, m in module.named_modules():
        for name, value in m.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for x in compat.flatten(value)[0] if type(value) in (list, tuple, dict) else [value]:
                found.add((".".join(filter(None, (path, name))), x if type(x) in PLAIN else id(x)))
    return found


def made_up(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of `module` with made-up parameters, on the CPU. Buffers keep their values; those without any are zeros."""
    sizes = [p.numel() for p in module.parameters()]
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(max(sizes, default=0) + len(sizes), generator=generator, dtype=dtype) / 3
    memo: dict[int, object] = {}
    for number, p in enumerate(module.parameters()):
        memo[id(p)] = nn.Parameter(values[number : number + p.numel()].view(p.shape), requires_grad=False)
    for b in module.buffers():
        held = torch.zeros(b.shape, dtype=b.dtype) if b.is_meta else b.detach().cpu().clone()
        memo[id(b)] = held.to(dtype) if b.is_floating_point() else held
    return copy.deepcopy(module, memo)


class _Foreign(TorchFunctionMode):
    """Refuses a parameter that is none of the module's own: its gradient would be nobody's."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for x in compat.flatten((args, kwargs))[0]:
            if isinstance(x, nn.Parameter) and x.requires_grad:
                raise contract(self.path, "it computes with a parameter that is not its own")
        return func(*args, **kwargs)
