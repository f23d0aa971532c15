"""Whether a parallelised model is still the one that was lowered: its modules, its parameters, its hooks.

A program belongs to one tree of modules. An adapter put in afterwards, a parameter put in another's place or a hook that
scales an output would run on a rank's shards as if they were whole, and nobody would reduce its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn

from meshplan import compat
from meshplan.compiler.hooks import gradient_hook
from meshplan.errors import PlanError


class Unchanged:
    """What `model` consists of now, to be compared at every call. As long as nothing changes that costs a few lists.

    Arguments:
        model: the parallelised model.
        reduced: parameters whose gradients are made whole after backward, so that a hook would see a part.
        swapped: parameters come and go as other objects (FSDP2's), so that only their names are compared. A hook on one of
            those that the optimizer holds would not be called, unless it waits for the gradient to be there.
    """

    def __init__(self, model: nn.Module, reduced: Iterable[nn.Parameter], swapped: bool) -> None:
        modules = list(model.named_modules())
        self._reduced, self._silent = tuple(reduced), tuple(model.parameters()) if swapped else ()
        self._modules = [(path, m._modules, _ids(m._modules)) for path, m in modules]
        self._parameters = [(path, m._parameters, self._held(m._parameters)) for path, m in modules]
        # Hooks of the model itself work on what is handed to it and what it gave, outside the program.
        self._hooks = [(path, t, set(t)) for path, m in modules if path for t in compat.hook_tables(m, False)]
        self._backward = [(path, t) for path, m in modules for t in compat.hook_tables(m, True)]
        tables = (*self._modules, *self._parameters, *self._hooks, *self._backward)
        self._tables = [entry[1] for entry in tables]
        self._objects = [t for _, t, _ in (*self._modules, *(() if swapped else self._parameters)) if t]
        self._latest = self._glance()

    def _held(self, table: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(table) if self._silent else _ids(table)

    def _glance(self) -> tuple[list[int], list[int]]:
        return list(map(len, self._tables)), [id(v) for table in self._objects for v in table.values()]

    def check(self) -> None:
        """Raises PlanError `model-changed` where a module or a parameter is another than it was, `gradient-hook` for hooks
        on gradients; hooks that were put around forwards since may look, and raise `model-changed` if they return."""
        if self._glance() != self._latest:
            self._compare()
            self._latest = self._glance()
        for p in self._reduced:
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise gradient_hook(f"a parameter of shape {list(p.shape)} has a hook, which", "")
        for p in self._silent:
            if p._backward_hooks:
                raise gradient_hook(f"a parameter of shape {list(p.shape)} that fsdp replaces has a hook, which", "")

    def _compare(self) -> None:
        for path, table, before in self._modules:
            if _ids(table) != before:
                raise _changed(f"the modules inside {path or 'the model'}", path)
        for path, table, before in self._parameters:
            if self._held(table) != before:
                raise _changed(f"the parameters of {path or 'the model'}", path)
        for path, table in self._backward:
            if table:
                raise gradient_hook(f"a backward hook of {path or 'the model'}", path)
        for path, hooks, known in self._hooks:
            if not known <= hooks.keys():
                raise _changed(f"a forward hook of {path}", path)
            for key in hooks.keys() - known:
                if not hasattr(hooks[key], "_meshplan_looks"):
                    hooks[key] = _looking(hooks[key], path)


def _ids(table: dict[str, Any]) -> tuple[Any, ...]:
    return (*table, *map(id, table.values()))


def _looking(hook: Callable[..., Any], path: str) -> Callable[..., Any]:
    """`hook`, which may return nothing."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> None:
        if hook(*args, **kwargs) is not None:
            raise _changed(f"what a forward hook makes of {path}", path)

    run._meshplan_looks = True  # type: ignore[attr-defined]
    return run


def _changed(what: str, module: str) -> PlanError:
    return PlanError(
        f"{what} changed after the model was parallelised, and the program is that of the model before",
        code="model-changed", module=module,
        legal="the change before meshplan.parallelize, with a plan of the changed model",
    )  # fmt: skip
