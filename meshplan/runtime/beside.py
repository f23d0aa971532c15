"""Shared experts computed while tokens are under way to the routed ones, without a change to the block that calls both.

    block   router, experts: rows leave, [shared experts], rows arrive, own experts, results home; shared experts: here already

The module beside the experts runs early, whole, on the tensor that the block will hand it (`meshplan.compiler.beside` found out
which); the block's own call of it returns the result. A block that then hands over something else is refused: random numbers of
the module have been drawn by then. Values stay as they are, and so does the order of every rank's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.beside import Beside
from meshplan.errors import PlanError
from meshplan.runtime.editing import Editing


@dataclass
class _Early:
    """A module beside experts, and what it made of `given` before the block called it."""

    what: Beside
    module: nn.Module
    running: bool = False
    given: Tensor | None = None
    made: Any = None


class EarlyRuns:
    """The modules beside one block's experts, one run of the block after the other."""

    def __init__(self, found: Sequence[Beside], modules: dict[str, nn.Module]) -> None:
        self.block = found[0].block
        self._early = [_Early(b, modules[b.module]) for b in found]
        self._arguments: list[Tensor] = []
        self._tokens: Tensor | None = None
        _stand_before(modules[self.block], self._block)
        for early in self._early:
            _stand_before(early.module, self._called(early))

    def begin(self, tokens: Tensor) -> None:
        """The experts are called with `tokens`, as the block's code hands them over."""
        self._tokens = tokens

    def meanwhile(self) -> Callable[[], None] | None:
        """What to run while they are under way; None for nothing."""
        ready = [(early, x) for early in self._early if (x := self._input(early.what)) is not None and not _watched(early.module)]
        return (lambda: self._run(ready)) if ready else None

    def _input(self, what: Beside) -> Tensor | None:
        if what.source == "argument":
            return self._arguments[what.at] if what.at < len(self._arguments) else None
        return self._tokens if what.source == "tokens" or self._tokens is None else self._tokens._base

    def _run(self, ready: Sequence[tuple[_Early, Tensor]]) -> None:
        for early, x in ready:
            early.running = True
            try:
                if Editing.running:  # it is no call of the block's code
                    with Editing.running[-1].quiet():
                        early.made = early.module(x)
                else:
                    early.made = early.module(x)
                early.given = x
            finally:
                early.running = False

    def _block(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._arguments = [x for x in compat.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        try:
            out = own(*args, **kwargs)
            for early in self._early:
                if early.given is not None:
                    raise self._other(early)
            return out
        finally:
            self._arguments, self._tokens = [], None
            for early in self._early:
                early.given = early.made = None

    def _called(self, early: _Early) -> Callable[..., Any]:
        def called(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if early.running or early.given is None:
                return own(*args, **kwargs)
            if kwargs or len(args) != 1 or args[0] is not early.given:
                raise self._other(early)
            made, early.given, early.made = early.made, None, None
            return made

        return called

    def _other(self, early: _Early) -> PlanError:
        return PlanError(
            f"{self.block or 'the model'} does not call {early.what.module} once with the tensor that it was lowered with",
            code="other-branch", module=self.block, legal="the branch that the example inputs take, or experts: {overlap: false}",
        )  # fmt: skip


@dataclass(frozen=True)
class _Before:
    """Stands in place of a module's own forward."""

    around: Callable[..., Any]
    own: Callable[..., Any]
    added: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.own, args, kwargs)


_HELD = ("forward", "_meshplan_forward")


def _stand_before(module: nn.Module, around: Callable[..., Any]) -> None:
    own = next((module.__dict__[name] for name in reversed(_HELD) if name in module.__dict__), None)
    base = getattr(type(module), "_meshplan_base", type(module))
    module.forward = _Before(around, own or base.forward.__get__(module), own is None)


def stand_aside(module: nn.Module) -> None:
    """Leave the forward of `module` as it was before `EarlyRuns`."""
    for name in _HELD:
        while isinstance(held := module.__dict__.get(name), _Before):
            if held.added:
                del module.__dict__[name]
            else:
                module.__dict__[name] = held.own


def _watched(module: nn.Module) -> bool:
    """Whether hooks look at `module`: they would see two calls."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
