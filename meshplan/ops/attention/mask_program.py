"""A mask function of flex_attention, `mask_mod(b, h, q, kv)`, read once and evaluated by any rank at any positions.

What the function computes is a short straight program: torch requires that it has no branches on its arguments. Read with four
numbers in the place of its arguments, it shows the calls that it makes, the constants in them, and the tensors that it reaches
for outside (document numbers, lengths). Those become arguments, which a rank can be handed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.errors import PlanError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BATCH, HEAD = 0, 1


@dataclass(frozen=True)
class Slot:
    """A tensor of the program: 0 to 3 are b, h, q and kv, those after them the results of the calls."""

    number: int


@dataclass(frozen=True)
class Captured:
    """A tensor that the function found outside, by its number."""

    number: int


@dataclass(frozen=True)
class Step:
    """One call, with `Slot` and `Captured` in the place of tensors; its results, flattened, are the next slots."""

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any


@dataclass(frozen=True)
class MaskProgram:
    """The calls of a mask function. Two are equal if they compute the same of what they are handed.

    Attributes:
        steps: the calls in order; out: the tensor that is the result.
    """

    steps: tuple[Step, ...]
    out: Slot | Captured

    @property
    def per_batch(self) -> bool:
        """Whether the mask may differ from one element of the batch to the next."""
        return self._uses(BATCH)

    @property
    def per_head(self) -> bool:
        """Whether the mask may differ from one query head to the next."""
        return self._uses(HEAD)

    @property
    def batch_rows(self) -> frozenset[int]:
        """The captured tensors that are used row by row, `docs[b, ...]`: a part of the batch needs a part of them."""
        by_row = {number for step in self.steps if (number := _row_of(step)) is not None}
        otherwise = {
            leaf.number
            for step in self.steps
            for i, leaf in enumerate(step.leaves)
            if isinstance(leaf, Captured) and (_row_of(step) is None or i > 0)
        }
        return frozenset(by_row - otherwise)

    @property
    def counts_batch(self) -> bool:
        """Whether the number of an element of the batch matters beyond which rows of `batch_rows` are its own."""
        rows = self.batch_rows
        return any(
            leaf == Slot(BATCH) and not (_row_of(step) in rows and i == _ROW_INDEX)
            for step in self.steps
            for i, leaf in _values_of(step)
        )

    def _uses(self, number: int) -> bool:
        return any(leaf == Slot(number) for step in self.steps for _, leaf in _values_of(step))

    def run(self, at: Sequence[Tensor], captured: Sequence[Tensor]) -> Tensor:
        """The mask at b, h, q and kv, tensors of no dims (or what `torch.vmap` makes look so)."""
        made = list(at)
        for step in self.steps:
            leaves = [
                made[x.number] if isinstance(x, Slot) else captured[x.number] if isinstance(x, Captured) else x
                for x in step.leaves
            ]
            args, kwargs = compat.unflatten(leaves, step.structure)
            made += [x for x in compat.flatten(step.func(*args, **kwargs))[0] if isinstance(x, Tensor)]
        return made[self.out.number] if isinstance(self.out, Slot) else captured[self.out.number]

    def evaluate(
        self, captured: Sequence[Tensor], batch: Tensor, heads: Tensor, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """bool [b, h, rows, columns]: who sees whom, b and h being 1 where the mask does not depend on them.

        Arguments:
            captured: what the function reached for, whole (of `batch_rows` the rows of this batch, if it counts nothing else).
            batch, heads, rows, columns: int64 numbers of the elements, query heads, queries and keys.
        """
        from torch.nn.attention.flex_attention import create_mask

        batch = batch if self.per_batch else batch[:1]
        heads = heads if self.per_head else heads[:1]
        held = [t.detach() for t in captured]

        def at(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.run((batch[b], heads[h], rows[q], columns[kv]), held)

        sizes = (len(batch), len(heads), len(rows), len(columns))
        return create_mask(at, *sizes, device=rows.device)


_ROW_INDEX = 1
"""Where the first index stands among the leaves of a subscript: after what is indexed."""


def _row_of(step: Step) -> int | None:
    """The captured tensor of which `step` takes row b: `docs[b]` or `docs[b, ...]`."""
    if getattr(step.func, "__name__", "") != "__getitem__" or len(step.leaves) <= _ROW_INDEX:
        return None
    of, first = step.leaves[0], step.leaves[_ROW_INDEX]
    return of.number if isinstance(of, Captured) and first == Slot(BATCH) else None


_SHAPED_LIKE = frozenset("new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like".split())
"""Functions that take a shape, dtype or device of their first argument, and no value."""


def _values_of(step: Step) -> list[tuple[int, Any]]:
    """The leaves whose values matter, with their places."""
    unread = 1 if getattr(step.func, "__name__", "") in _SHAPED_LIKE else 0
    return list(enumerate(step.leaves))[unread:]


def read_mask(mask_mod: MaskMod, device: torch.device) -> tuple[MaskProgram, list[Tensor]]:
    """The program of `mask_mod`, and the tensors that it captured, in the order of their numbers.

    Raises PlanError `flex-attention` for a function that writes into a tensor or whose result is no boolean.
    """
    at = _numbers(device)
    reading = _Reading(at)
    try:
        with reading:
            out = mask_mod(*at)
    except compat.data_dependent_errors() as error:
        raise refused(
            f"the mask function {name_of(mask_mod)}, which reads a value", "torch operations alone"
        ) from error
    if not isinstance(out, Tensor) or out.dtype != torch.bool or out.dim():
        shown = f"{out.dtype}{list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise refused(
            f"a mask function {name_of(mask_mod)} that returns {shown}", "one that returns a boolean of no dims"
        )
    return MaskProgram(tuple(reading.steps), reading.slot(out)), reading.captured


def is_identity(score_mod: Callable[..., Any], like: Tensor) -> bool:
    """Whether a score function hands back the very score that it is given."""
    at = _numbers(like.device)
    with compat.without_function_modes():
        score = torch.zeros((), dtype=like.dtype, device=like.device)
    with _Reading((score, *at)):
        return score_mod(score, *at) is score


def _numbers(device: torch.device) -> tuple[Tensor, ...]:
    """What stands for b, h, q and kv while a function is read; no mode sees them made."""
    with compat.without_function_modes():
        return tuple(torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))


def refused(what: str, legal: str) -> PlanError:
    """PlanError `flex-attention`, its module and place still to be said."""
    return PlanError(f"flex_attention with {what}", code="flex-attention", legal=legal)


def name_of(function: Any) -> str:
    """What a user calls a function by."""
    return str(getattr(function, "__qualname__", type(function).__name__)).replace(".<locals>", "")


def _indexed(x: Tensor, index: Any) -> Tensor:
    """`x[index]` as flex_attention takes it: a number that is a tensor without dims stays a tensor."""
    numbers = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, Tensor | int) for i in numbers):
        return x[index]
    at = [i if isinstance(i, Tensor) else torch.tensor(i, device=x.device) for i in numbers]
    return torch.ops.aten.index(x, at)  # type: ignore[no-any-return]


class _Reading(TorchFunctionMode):
    """Records the calls of one run; no other mode sees them."""

    def __init__(self, at: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.captured: list[Tensor] = []
        self._slots: dict[int, Slot | Captured] = {id(t): Slot(i) for i, t in enumerate(at)}
        self._alive: list[Any] = list(at)
        self._made = len(at)

    def slot(self, t: Tensor) -> Slot | Captured:
        if id(t) not in self._slots:
            self._slots[id(t)] = Captured(len(self.captured))
            self.captured.append(t)
        return self._slots[id(t)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, structure = compat.flatten((args, kwargs))
        with compat.without_function_modes():
            out = _indexed(*args) if func is Tensor.__getitem__ else func(*args, **kwargs)
        made = [x for x in compat.flatten(out)[0] if isinstance(x, Tensor)]
        if not made:
            return out  # a shape, a dtype
        if any(x is y for x in made for y in leaves) and getattr(func, "__name__", "").endswith("_"):
            raise refused(f"a mask function that writes ({func.__name__}) into a tensor", "one that only computes")
        self.steps.append(Step(func, tuple(self.slot(x) if isinstance(x, Tensor) else x for x in leaves), structure))
        for t in made:
            self._slots[id(t)] = Slot(self._made)
            self._made += 1
        self._alive += [*leaves, *made]
        return out
