"""Edits of single torch calls while a module's own code runs: new sizes, redistributed arguments, semantic operators.

Only modules that need an edit pay for it: the mode is pushed for their forward and taken off while their children run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler.capture import is_recorded, name_of
from meshplan.errors import PlanError, Where
from meshplan.ops.attention.flex import taken_on_rank, taken_unedited

_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


@dataclass(frozen=True)
class BoundEdit:
    """An edit bound to this rank: see `meshplan.compiler.edits.Edit`."""

    func: str
    sized: tuple[tuple[Any, ...], Any, frozenset[int]] | None
    converts: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None
    where: Where | None


class Editing(TorchFunctionMode):
    """Counts the recorded calls of one module invocation and applies the edits; a call that is not the one an edit was
    made for means that the code took another branch than the one that was lowered, and is refused."""

    running: ClassVar[list[Editing]] = []
    # Module path by the identity of its edits, for errors. No attribute of the mode: torch would compile a program for
    # each layer, since their paths differ.
    paths: ClassVar[dict[int, str]] = {}

    def __init__(self, edits: Mapping[int, BoundEdit]) -> None:
        super().__init__()
        self.edits, self.ordinal, self.asleep, self.children = edits, 0, 0, 0

    def __enter__(self) -> Editing:
        Editing.running.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        Editing.running.pop()
        super().__exit__(*exc)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls in here are ours, not the module's."""
        self.asleep += 1
        try:
            yield
        finally:
            self.asleep -= 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.asleep:
            return func(*args, **kwargs)
        edit = self.edits.get(self.ordinal)
        if edit is not None and _MIRRORED.get(name_of(func)) == edit.func:
            # Python asks the right operand first where that is a Parameter and the left a plain tensor.
            func, args = getattr(Tensor, edit.func), args[::-1]
        if edit is not None and name_of(func) == edit.func:
            self.ordinal += 1
            return self._apply(edit, func, args, kwargs)
        out = func(*args, **kwargs)
        if is_recorded(func, out):
            if edit is not None:
                raise self._other_branch(name_of(func), edit)
            self.ordinal += 1
        return out

    def _apply(self, edit: BoundEdit, func: Any, args: Any, kwargs: Any) -> Any:
        if edit.converts or edit.sized:
            leaves, structure = compat.flatten((args, kwargs))
            for index, convert in edit.converts:
                leaves[index] = convert(leaves[index])
            if edit.sized:
                tensors = iter([x for x in leaves if isinstance(x, Tensor)])
                sizes, structure, slots = edit.sized
                leaves = [next(tensors) if i in slots else x for i, x in enumerate(sizes)]
            args, kwargs = compat.unflatten(leaves, structure)
        if edit.run is not None:
            return edit.run(func, args, kwargs)
        return func(*args, **kwargs)

    def handing_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the next call of another module, redistributed."""
        self.children += 1
        edit = self.edits.get(-self.children)
        if edit is None:
            return args, kwargs
        leaves, structure = compat.flatten((args, kwargs))
        with self.quiet():
            for index, convert in edit.converts:
                leaves[index] = convert(leaves[index])
        handed: tuple[tuple[Any, ...], dict[str, Any]] = compat.unflatten(leaves, structure)
        return handed

    def _other_branch(self, name: str, edit: BoundEdit) -> PlanError:
        path = Editing.paths.get(id(self.edits), "")
        return PlanError(
            f"{path or 'the model'} calls {name} where {edit.func} was lowered: its code took another branch",
            code="other-branch", where=edit.where, module=path,
            legal="the branch that the example inputs take",
        )  # fmt: skip


class FlexEditing(Editing):
    """In a model whose attention is by flex_attention, which takes part as the one call that was lowered."""

    def __enter__(self) -> Editing:
        self._taking = compat.taking_flex(taken_on_rank())
        self._taking.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._taking.__exit__(None, None, None)


def unedited_flex(edits: Mapping[int, BoundEdit]) -> AbstractContextManager[None]:
    """In place of a mode, for a module that calls flex_attention and has no edits."""
    assert not edits
    return compat.taking_flex(taken_unedited())


def sleeping(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(module, ...)` of a child module with its caller's edits off, but for those of what it is handed: hooks and code
    of the child are not the caller's calls."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not Editing.running:
            return call(*args, **kwargs)
        mode = Editing.running[-1]
        if not mode.asleep:
            handed, kwargs = mode.handing_over(args[1:], kwargs)
            args = (args[0], *handed)
        if compat.current_function_mode() is mode:
            # Taken off the stack, it costs the child nothing.
            mode.__exit__(None, None, None)
            try:
                return call(*args, **kwargs)
            finally:
                mode.__enter__()
        with mode.quiet():
            return call(*args, **kwargs)

    return run
