"""This rank's arguments of a call: the user's own where they mean the same, else the single device's, made local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.compiler.capture import Call, Ref, Trace, run_call, tensors_in
from meshplan.compiler.kinds import Kind, replicated
from meshplan.compiler.known import Known
from meshplan.compiler.layout import local_shape
from meshplan.compiler.localize import CREATED, SIZED, local_leaves, same_constant, same_index
from meshplan.plan.placements import Shard


class Arguments(Known):
    """The part of a propagation that settles what a call is given."""

    def _local_arguments(self, rec: Call, leaves: list[Any], structure: Any, out_kinds: list[list[Kind]]):
        """This rank's arguments: the user's own where they already mean the same, else the single device's, made local."""
        shapes = [self.trace.values[v].shape for v in rec.outs]
        local = [local_shape(s, k, self.axes) for s, k in zip(shapes, out_kinds, strict=True)]
        if rec.name in SIZED | CREATED | {"unflatten", "split", "split_with_sizes", "tensor_split"}:
            own = self._try_own(rec, leaves, structure)
            if own is not None and not same_constant(_fill(rec, rec.leaves, rec.structure), _fill(rec, leaves, structure)):
                own = None  # filled with a number that is this rank's: a size that the code reads
            if own is not None and [tuple(s) for s in own] == local:
                return leaves, structure, False, None
            widened = self._widened(rec, leaves, own, shapes, out_kinds) if own is not None else False
            if widened:
                return leaves, structure, False, None
            dims = self._split_sizes(rec, local)
            args, kwargs = local_leaves(
                rec.name, [x.value if isinstance(x, Ref) else x for x in rec.leaves], rec.structure, local, dims
            )
            flat, new_structure = compat.flatten((args, kwargs))
            run = list(flat)
            refs = [i for i, x in enumerate(rec.leaves) if isinstance(x, Ref)]
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            for i, t in zip(refs, tensors, strict=True):
                run[i] = t
            return run, new_structure, True, _slotted(run, new_structure)
        if rec.name == "repeat":
            own = self._try_own(rec, leaves, structure)
            if own is not None and (
                [tuple(s) for s in own] == local or self._widened(rec, leaves, own, shapes, out_kinds)
            ):
                return leaves, structure, False, None
        if rec.name == "__getitem__":
            x = leaves[0]
            shape = self.trace.values[rec.leaves[0].value].shape
            index_a = compat.unflatten(list(rec.leaves), rec.structure)[0][1]
            index_a = _with_tensors(index_a, self.trace)
            index_b = compat.unflatten(list(leaves), structure)[0][1]
            if same_index(index_a, tuple(shape), index_b, tuple(x.shape)):
                return leaves, structure, False, None
        if len(leaves) != len(rec.leaves):
            raise self.diverged(f"{rec.name} has other arguments there")
        run = [x if isinstance(x, Tensor) else y for x, y in zip(leaves, rec.leaves, strict=True)]
        same = all(isinstance(x, Tensor) or same_constant(x, y) for x, y in zip(leaves, rec.leaves, strict=True))
        if same:
            return leaves, structure, False, None
        return run, rec.structure, True, _slotted(run, rec.structure)

    def _split_sizes(self, rec: Call, local: list[tuple[int, ...]]) -> list[int] | None:
        if "split" not in rec.name:
            return None
        args, kwargs = compat.unflatten(list(rec.leaves), rec.structure)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        return [shape[dim] for shape in local]

    def _try_own(self, rec: Call, leaves: list[Any], structure: Any) -> list[tuple[int, ...]] | None:
        out = self._attempt(rec, *compat.unflatten(list(leaves), structure))
        return None if out is None else [tuple(t.shape) for t in tensors_in(out)]

    def _attempt(self, rec: Call, args: Any, kwargs: Any) -> Any:
        """The call with the user's own arguments; None where they do not fit this rank's shapes."""
        try:
            with torch.no_grad(), compat.quiet_fake_tensors():
                return run_call(rec.func, args, kwargs, self.stack.path, rec.index not in self.trace.variable)
        except (RuntimeError, ValueError, IndexError):
            return None

    def _widened(
        self, rec: Call, leaves: list[Any], own: list[tuple[int, ...]], shapes: list[Any], out_kinds: list[list[Kind]]
    ) -> bool:
        """A constant made, or a dim expanded or repeated, at this rank's size: all its shards are equal, so it may count as
        sharded."""
        if rec.name not in CREATED | _REPEATING or len(own) != 1 or len(own[0]) != len(shapes[0]):
            return False
        x = next((t for t in leaves if isinstance(t, Tensor)), None) if rec.name in _REPEATING else None
        kinds = list(out_kinds[0])
        for d, (mine, full) in enumerate(zip(own[0], shapes[0], strict=True)):
            if mine == full:
                continue
            if x is not None:
                held = d - (len(own[0]) - x.dim())
                if held >= 0 and x.shape[held] != 1:
                    return False
            order = sorted(range(len(self.axes)), key=lambda k: not self.axes[k].data)
            left = full
            for k in order if d == 0 else [*order[::-1]]:
                if (
                    left != mine
                    and left % self.axes[k].degree == 0
                    and replicated(kinds[k])
                    and left // self.axes[k].degree >= mine
                ):
                    left //= self.axes[k].degree
                    kinds[k] = Shard(d)
            if left != mine:
                return False
        out_kinds[0][:] = kinds
        return True


_REPEATING = {"expand", "broadcast_to", "repeat"}


def _fill(rec: Call, leaves: Sequence[Any], structure: Any) -> Any:
    """What `full` and `new_full` fill with; None for other calls."""
    if rec.name not in ("full", "new_full"):
        return None
    args, kwargs = compat.unflatten(list(leaves), structure)
    return kwargs["fill_value"] if "fill_value" in kwargs else args[1 + (rec.name == "new_full")]


def _slotted(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], Any, frozenset[int]]:
    """Arguments as a template: constants, and the places where tensors go."""
    slots = frozenset(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    return tuple(None if i in slots else x for i, x in enumerate(leaves)), structure, slots


def _with_tensors(index: Any, trace: Trace) -> Any:
    if isinstance(index, tuple):
        return tuple(trace.values[i.value] if isinstance(i, Ref) else i for i in index)
    return trace.values[index.value] if isinstance(index, Ref) else index
