"""One torch call of the rank beside the single device's: how it runs on shards, and what its results are."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.compiler import few_heads, ownership
from meshplan.compiler.arguments import Arguments
from meshplan.compiler.capture import Call, Ref, run_call, tensors_in
from meshplan.compiler.edits import Edit, Replacement
from meshplan.compiler.experts import INSIDE
from meshplan.compiler.hooks import forward_hook
from meshplan.compiler.kinds import A, I, Kind, N, Pending, R, normal, replicated, splits, user_letter
from meshplan.compiler.layout import Axis, Info, local_shape
from meshplan.compiler.match import Choice
from meshplan.compiler.ownership import Owed
from meshplan.compiler.redistribute import Redistributing
from meshplan.compiler.rules.base import REP, Strategy
from meshplan.compiler.sites import Move
from meshplan.compiler.spared import Spared
from meshplan.compiler.uses import Decided
from meshplan.errors import PlanError, Where
from meshplan.plan.placements import Shard

RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal normal_ uniform_ "
    "exponential_ geometric_ cauchy_ log_normal_ random_ poisson alpha_dropout feature_dropout dropout1d dropout2d dropout3d "
    "feature_alpha_dropout rrelu gumbel_softmax".split()
)


class Calls(Redistributing, Arguments, Spared):
    """The part of a propagation that runs recorded calls."""

    def recorded(self, rec: Call, args: Any, kwargs: Any) -> Any:
        leaves, structure = compat.flatten((args, kwargs))
        slots = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        expected = [i for i, x in enumerate(rec.leaves) if isinstance(x, Ref)]
        if len(slots) != len(expected):
            raise self.diverged(f"{rec.name} has {len(slots)} tensor arguments there")
        for i, j in zip(slots, expected, strict=True):
            info = self.info(leaves[i])
            if info.value == -1:
                info.value = rec.leaves[j].value
            if info.value != rec.leaves[j].value and rec.leaves[j].value in info.also:
                self.seen_as(info, rec.leaves[j].value)
            if info.value != rec.leaves[j].value:
                raise self.diverged(f"{rec.name} uses another tensor there")
        if rec.name in RANDOM:
            raise PlanError(
                f"{rec.name} draws from the default generator, which differs between ranks", code="random-op",
                where=rec.where, module=rec.module, legal="dropout, or random numbers drawn outside the model",
            )  # fmt: skip
        tensors = [leaves[i] for i in slots]
        if not rec.in_place and not any(map(compat.is_fake, tensors)):
            out = self._attempt(rec, args, kwargs)
            if self._same_values(rec, out):
                self.cursor += 1
                self.stack.next_ordinal()
                neutral: list[list[Kind]] = [[N] * len(self.axes) for _ in rec.outs]
                self._label_outputs(rec, out, args, neutral, False, [])
                return out
        self._open_parameters(tensors, rec.where)
        written = tensors[0] if rec.in_place else None
        handed = [] if torch.is_grad_enabled() else [self._as_differentiated(t) for t in tensors]
        choices, tensors, converts = self._choose(rec, tensors)
        if written is not None and tensors[0] is not written:
            raise PlanError(
                f"{rec.name} writes into {self.show(written)}, and could only write into a redistributed copy of it",
                code="in-place", where=rec.where, module=rec.module, legal="an out-of-place operation, or another layout",
            )  # fmt: skip
        for i, t in zip(slots, tensors, strict=True):
            leaves[i] = t
        infos = [self.info(t) for t in tensors]
        seen, requires = zip(*map(self._as_differentiated, tensors), strict=True) if tensors else ((), ())
        whole = {
            k: ownership.combine([kinds[k] for kinds in seen], requires, [i.data for i in infos])
            for k in range(len(self.axes)) if choices[k] is None
        }  # fmt: skip
        out_kinds = self._out_kinds(rec, choices, whole)
        replacement = self._replacement(rec, choices)
        if replacement is not None:
            self._refuse_in_checkpoint(f"{rec.name} runs as an operator of its own", rec.module, rec.where)
        whole_kinds = [list(kinds) for kinds in out_kinds]
        run_leaves, run_structure, edited, sized = self._local_arguments(rec, leaves, structure, out_kinds)
        for k in {
            k for old, new in zip(whole_kinds, out_kinds, strict=True) for k in range(len(new)) if old[k] != new[k]
        }:
            # Sharded by its own size alone: each rank now uses the whole value in its own way.
            tensors = self._used_apart(rec, tensors, k, converts)
        if converts:
            tensor = iter(tensors)
            run_leaves = [next(tensor) if isinstance(x, Tensor) else x for x in run_leaves]
        taken = tuple(tuple(self.info(t).kinds) for t in tensors)
        self.cursor += 1
        ordinal = self.stack.next_ordinal()
        a, kw = compat.unflatten(run_leaves, run_structure)
        if replacement is not None:
            operator = replacement
            out = self.result.timeline.operator(
                rec,
                self.stack.path,
                lambda: self.chooser.run_replacement(operator, rec, a, kw, self.axes),
                tensors_in((a, kw)),
            )
        else:
            out = run_call(rec.func, a, kw, self.stack.path, rec.index not in self.trace.variable)
        self._label_outputs(rec, out, a, out_kinds, any(i.data for i in infos), infos)
        if not torch.is_grad_enabled():
            owed = self._owes(rec, handed, choices)
            if converts or replacement:
                owed = Owed(f"{rec.name} is redistributed or replaced", owed.apart)
            for t, kinds in zip(tensors_in(a[0] if rec.in_place else out), out_kinds, strict=True):
                self._hide(t, kinds, tensors, owed)
        made = tuple(tuple(self.info(t).kinds) for t in tensors_in(a[0] if rec.in_place else out))
        operators = tuple(c.strategy.replace if c is not None else None for c in choices)
        self.result.decided.append(Decided(rec, taken, made, operators))
        if edited or replacement or converts:
            if ordinal < 0:
                raise forward_hook(rec.name, rec.module, rec.where)
            edit = Edit(ordinal, rec.name, sized if edited else None, tuple(converts), replacement, rec.where)
            self.result.invocations.edits.append((self.frames.stack[-1].serial, rec.module, edit))
        return out

    def _same_values(self, rec: Call, out: Any) -> bool:
        """Whether a constant (computed for real: see `run_call`) came out here as on the single device, though perhaps
        from this rank's part of another constant: `(positions == 0).all()` is one truth on every rank."""
        made = tensors_in(out)
        known = [self.trace.values[v] for v in rec.outs]
        if len(made) != len(known) or any(map(compat.is_fake, [*made, *known])):
            return False
        with compat.without_fake_mode():
            return all(torch.equal(a, b) for a, b in zip(made, known, strict=True))

    def _open_parameters(self, tensors: list[Tensor], where: Where | None) -> None:
        # Each module's use of a replicated parameter settles its own gradient ownership.
        for t in tensors:
            info = self.info(t)
            if info.param is not None:
                self.result.reads.setdefault((self.stack.path, info.param), where)
            if info.param is None or not t.requires_grad:
                continue
            for k, axis in enumerate(self.axes):
                if replicated(info.kinds[k]):
                    use = (self.stack.path, info.param, axis.name)
                    if use not in self.result.param_use:
                        self.result.param_use[use] = Pending(use, False)
                        self.result.used_at[use] = where
                    info.kinds[k] = self.result.param_use[use].find()
                    if (info.param, axis.name) in self.decisions.split:
                        self.result.param_use[use].need(R)
                        info.kinds[k] = R

    def _choose(
        self, rec: Call, tensors: list[Tensor]
    ) -> tuple[list[Choice | None], list[Tensor], list[tuple[int, Move]]]:
        choices: list[Choice | None] = []
        converts: list[tuple[int, Move]] = []
        for k, axis in enumerate(self.axes):
            kinds = [self.info(t).kinds[k] for t in tensors]
            if all(replicated(kind) for kind in kinds) and self.chooser.splits_whole(rec, axis):
                choices.append(self._split_inside(rec, tensors, k, converts))
                continue
            if all(replicated(kind) for kind in kinds):
                choices.append(None)
                fixed = ownership.to_invariant(kinds, [t.requires_grad for t in tensors])
                for j in fixed:
                    tensors[j] = self._converted(tensors[j], k, I, rec, j, converts)
                continue
            params = [self.info(t).param is not None for t in tensors]
            pieces = axis.degree * self._pieces_beside(tensors, k)
            choice = self.chooser.choose(rec, kinds, params, pieces, [t.requires_grad for t in tensors], axis.name)
            if choice is None:
                raise self.refuse(rec, tensors, axis)
            self._check_heads(rec, tensors, axis, kinds, choice)
            for j, want in enumerate(choice.wanted):
                if want is not None and not (want == R and replicated(kinds[j])):
                    tensors[j] = self._converted(tensors[j], k, want, rec, j, converts)
            if all(replicated(self.info(t).kinds[k]) for t in tensors):
                choices.append(None)
                fixed = ownership.to_invariant(
                    [self.info(t).kinds[k] for t in tensors], [t.requires_grad for t in tensors]
                )
                for j in fixed:
                    tensors[j] = self._converted(tensors[j], k, I, rec, j, converts)
                continue
            for j, t in enumerate(tensors):
                kind = self.info(t).kinds[k]
                if not t.requires_grad:
                    continue
                if not torch.is_grad_enabled():
                    continue  # see `_owes`
                if isinstance(kind, Pending):
                    kind.need(R)
                elif kind == I:
                    tensors[j] = self._converted(t, k, R, rec, j, converts)
            choices.append(choice)
        return choices, tensors, converts

    def _split_inside(self, rec: Call, tensors: list[Tensor], k: int, converts: list[tuple[int, Move]]) -> Choice:
        """An operator that shares out whole arguments among the ranks of axis number `k` and gathers what they make: alike on
        all ranks from outside, while each uses the parameters in its own way."""
        for j, t in enumerate(tensors):
            want = R if self.info(t).param is not None else I
            kind = self.info(t).kinds[k]
            if t.requires_grad and isinstance(kind, Pending):
                kind.need(want)
            elif t.requires_grad and kind != want:
                tensors[j] = self._converted(t, k, want, rec, j, converts)
        whole = Strategy((REP,) * len(tensors), (I,) * len(rec.outs), INSIDE)
        return Choice(whole, (None,) * len(tensors), whole.outs, 0.0)

    def _pieces_beside(self, tensors: list[Tensor], k: int) -> int:
        """Into how many pieces the axes outside axis number `k` cut the dims that it splits further: what is even over all of
        them together is even on each rank."""
        most = 1
        for t in tensors:
            own = self.info(t).kinds
            here = own[k]
            if isinstance(here, Shard):
                beside = [a.degree for j, a in enumerate(self.axes[:k]) if splits(own[j], here.dim)]
                most = max(most, math.prod(beside))
        return most

    def _check_heads(self, rec: Call, tensors: list[Tensor], axis: Axis, kinds: list[Kind], choice: Choice) -> None:
        """Before a projection is gathered because its heads are too few for the axis: see few_heads.py."""
        if choice.wanted[0] != R or len(tensors) != 1:
            return
        source = self.info(tensors[0]).source
        split = few_heads.needed(
            rec.name, self.trace.values[rec.ins[0]], self.trace.values[rec.outs[0]], kinds[0], axis, source
        )
        if split is not None and self.split.get(axis.name, split.pieces) == split.pieces:
            raise few_heads.SplitNeeded(split)

    def _source(self, rec: Call, infos: list[Info], kinds: list[Kind]) -> frozenset[str]:
        if not any(isinstance(k, Shard) for k, a in zip(kinds, self.axes, strict=True) if not a.data):
            return frozenset()
        own = {i.param for i in infos if i.param and any(isinstance(k, Shard) for k in i.kinds)}
        return frozenset(own) or frozenset().union(*(i.source for i in infos))  # type: ignore[arg-type]

    def _used_apart(self, rec: Call, tensors: list[Tensor], k: int, converts: list[tuple[int, Move]]) -> list[Tensor]:
        """The replicated `tensors` with gradients that are partial over axis number `k`."""
        out = []
        for j, t in enumerate(tensors):
            kind = self.info(t).kinds[k]
            if t.requires_grad and isinstance(kind, Pending):
                kind.need(R)
            out.append(self._converted(t, k, R, rec, j, converts) if t.requires_grad and kind == I else t)
        return out

    def _converted(self, t: Tensor, k: int, want: Kind, rec: Call, j: int, converts: list[tuple[int, Move]]) -> Tensor:
        before = len(self.result.moves)
        leaf = [i for i, x in enumerate(rec.leaves) if isinstance(x, Ref)][j]
        out = self.hosted(t, k, want, rec.where, leaf=leaf)
        for site, move, _ in self.result.moves[before:]:
            if site.side == "call":
                converts.append((leaf, move))
        return out

    def _out_kinds(self, rec: Call, choices: list[Choice | None], whole: dict[int, Kind]) -> list[list[Kind]]:
        shapes = [self.trace.values[v].shape for v in rec.outs]
        return [
            [normal(choices[k].outs[o], len(shapes[o])) if choices[k] is not None else whole[k] for k in range(len(self.axes))]  # type: ignore[union-attr]
            for o in range(len(rec.outs))
        ]  # fmt: skip

    def _replacement(self, rec: Call, choices: list[Choice | None]) -> Replacement | None:
        names = {c.strategy.replace for c in choices if c is not None and c.strategy.replace}
        chosen = {self.axes[k].name: c.strategy for k, c in enumerate(choices) if c is not None}
        return self.chooser.replacement(rec, names, chosen, self.axes)

    def _label_outputs(
        self, rec: Call, out: Any, args: Any, out_kinds: list[list[Kind]], data: bool, infos: list[Info]
    ) -> None:
        written = args[0] if rec.in_place else out
        made = [t for t in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(t, Tensor)]
        if len(made) != len(rec.outs):
            raise self.diverged(f"{rec.name} returns {len(made)} tensors there")
        for t, value, kinds in zip(made, rec.outs, out_kinds, strict=True):
            want = local_shape(self.trace.values[value].shape, kinds, self.axes)
            if tuple(t.shape) != want:
                raise PlanError(
                    f"{rec.name} gives {list(t.shape)} on this rank where its layout says {list(want)}",
                    code="local-shape", where=rec.where, module=rec.module,
                )  # fmt: skip
            if not t.requires_grad:
                kinds = [N if replicated(k) else k for k in kinds]
            if rec.in_place and id(t) in self.infos:
                self._check_in_place(rec, t, kinds)
            self.label(t, Info(value, kinds, data, None, self._source(rec, infos, kinds)))
            if rec.in_place:
                self.written(t, kinds)

    def _hide(self, t: Tensor, kinds: list[Kind], ins: list[Tensor], owed: Owed) -> None:
        """Remember what a result made with gradients off is: a custom autograd function may yet give it one, and then what
        backward owes to the redistributions inside is owed by nobody."""
        carried = [self.unseen[id(x)][1] for x in ins if id(x) in self.unseen]
        if carried or any(x.requires_grad for x in ins):
            self.unseen[id(t)] = (kinds, functools.reduce(Owed.and_also, carried, owed))

    def _as_differentiated(self, t: Tensor) -> tuple[list[Kind], bool]:
        """The kinds of `t`, and whether it has a gradient, where the code that runs with gradients off turns out to be the
        forward of a custom autograd function."""
        kinds = self.info(t).kinds
        hidden = None if torch.is_grad_enabled() else self.unseen.get(id(t))
        return (list(kinds), t.requires_grad) if hidden is None else (hidden[0], True)

    def _owes(self, rec: Call, handed: list[tuple[list[Kind], bool]], choices: list[Choice | None]) -> Owed:
        """What a backward of this call would owe: a reduction that nobody is told of, and gradients whose owner is open."""
        owed = Owed()
        for k, (axis, choice) in enumerate(zip(self.axes, choices, strict=True)):
            live = [kinds[k] for kinds, differentiated in handed if differentiated]
            apart = choice is not None and choice.strategy.replace != INSIDE
            if (apart and I in live) or (choice is None and I in live and R in live):
                owed = owed.and_also(Owed(f"the gradient of {rec.name} is partial over {axis.name}"))
            if apart:
                owed = owed.and_also(Owed(apart=frozenset(kind for kind in live if isinstance(kind, Pending))))
        return owed

    def uncover(self, t: Tensor) -> None:
        kinds, owed = self.unseen.pop(id(t))
        if owed.lost:
            rec = self.trace.calls[min(self.cursor, len(self.trace.calls) - 1)]
            raise PlanError(
                f"{rec.name} uses the result of a custom autograd function, in which {owed.lost}: its backward would not know",
                code="custom-function", where=rec.where, module=rec.module,
                legal="the function's forward written out in torch calls, or layouts that need no redistribution in it",
            )  # fmt: skip
        for pending in owed.apart:
            pending.need(R)
        self.infos[id(t)].kinds = kinds

    def _check_in_place(self, rec: Call, t: Tensor, kinds: list[Kind]) -> None:
        alone = all(other is t for other in self.sharing.get(compat.storage_key(t), []))
        for axis, old, new in zip(self.axes, self.infos[id(t)].kinds, kinds, strict=True):
            if new == A and replicated(old) and alone:
                continue  # as a sum of losses begins: the mean of equal values is theirs, and nobody else holds this one
            if old != new and not (replicated(old) and replicated(new)):
                raise PlanError(
                    f"{rec.name} writes {user_letter(new)} on {axis.name} into a tensor that is {user_letter(old)}",
                    code="in-place", where=rec.where, module=rec.module, legal="an out-of-place operation",
                )  # fmt: skip
