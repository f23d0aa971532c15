"""What one module does on a rank beside its own forward: redistribute what comes in and goes out, edit its torch calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.tracing import replaying
from meshplan.runtime.editing import BoundEdit, Editing, sleeping
from meshplan.runtime.views import Step, lowered_class

Convert = Callable[[Tensor], Tensor]
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Duties:
    """What is to be done around one module's forward.

    Attributes:
        path: the module's canonical path.
        inputs: by argument name (or key path into one), outputs: by key path of the output.
        positions: index of each plain argument name in forward's positional arguments.
        edits: by ordinal of the torch call; None where the module's own code runs as it is.
        asked: what the model hears when it asks whether it is traced (`meshplan.compiler.tracing`); the root's alone.
        around: called with (run, args, kwargs) in place of the whole: the root's step, or recompute.
        editing: what applies `edits`.
        always: also where `forward` is called directly in a step, `child.forward(x)`, which runs no hooks either; the root and
            what runs on DTensors.
        called: whether the module has just been called, and its forward has not begun.
    """

    path: str
    inputs: Mapping[str, Convert] = field(default_factory=dict)
    outputs: Mapping[str, Convert] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)
    edits: Mapping[int, BoundEdit] | None = None
    around: Around | None = None
    asked: tuple[bool, ...] = ()
    editing: Callable[[Mapping[int, BoundEdit]], AbstractContextManager[Any]] = Editing
    always: bool = False
    called: bool = False

    def __post_init__(self) -> None:
        # Where each input is found, worked out once: (position, name, path into it, convert).
        found = []
        for key, convert in self.inputs.items():
            name, _, path = key.partition(".")
            at = self.positions.get(name, int(name) if name.isdigit() else sys.maxsize)
            found.append((at, name, path, convert))
        self._found = tuple(found)
        self._whole = self.outputs.get("")
        if self.edits is not None:
            Editing.paths[id(self.edits)] = self.path

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for at, name, path, convert in self._found:
            if at < len(args):
                args = (*args[:at], _at_path(args[at], path, convert), *args[at + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: _at_path(kwargs[name], path, convert)}
        return args, kwargs

    def convert_outputs(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self._whole(out) if self._whole else out
        leaves, structure = compat.flatten(out)
        keys = [key for key, _ in compat.flatten_with_path(out)]
        leaves = [
            self.outputs[k](x) if k in self.outputs and isinstance(x, Tensor) else x
            for k, x in zip(keys, leaves, strict=True)
        ]
        return compat.unflatten(leaves, structure)


def _at_path(value: Any, path: str, convert: Convert) -> Any:
    if not path:
        return convert(value) if isinstance(value, Tensor) else value
    leaves, structure = compat.flatten(value)
    keys = [key for key, _ in compat.flatten_with_path(value)]
    return compat.unflatten([convert(x) if k == path else x for k, x in zip(keys, leaves, strict=True)], structure)


def _forward_of(cls: type) -> Callable[..., Any]:
    base = cls.forward  # type: ignore[attr-defined]

    def plain(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self.__dict__.get("_meshplan_forward")
        return base(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    def edited(self: Any, duties: Duties, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if duties.edits is None:
            return plain(self, args, kwargs)
        with duties.editing(duties.edits):
            return plain(self, args, kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        duties: Duties = self._meshplan_duties
        if duties.inputs:
            args, kwargs = duties.convert_inputs(args, kwargs)
        if duties.asked:
            with replaying(duties.asked):
                out = edited(self, duties, args, kwargs)
        else:
            out = edited(self, duties, args, kwargs)
        return duties.convert_outputs(out) if duties.outputs else out

    @functools.wraps(base)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        duties: Duties = self._meshplan_duties
        if not (duties.called or duties.always) and Step.depth:
            # The calls inside were lowered as those of the module whose code says `child.forward(x)`.
            return plain(self, args, kwargs)
        duties.called = False
        around = duties.around
        if around is None:
            return run(self, *args, **kwargs)
        return around(MethodType(run, self), args, kwargs)

    return forward


def _call_of(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        duties: Duties = self._meshplan_duties
        duties.called = True
        try:
            return call(self, *args, **kwargs)
        finally:
            duties.called = False

    return run


_FORWARDS: dict[type, Callable[..., Any]] = {}
_CALLS: dict[tuple[type, bool, bool], Callable[..., Any]] = {}


def install(module: nn.Module, duties: Duties | None, views: Mapping[str, Any], sleeps: bool) -> None:
    """Give `module` a class that does `duties`, shows the parameters in `views` as local tensors and, with `sleeps`, turns
    its caller's edits off while it runs."""
    cls = getattr(type(module), "_meshplan_base", type(module))
    forward = call = None
    if duties is not None:
        if cls not in _FORWARDS:
            _FORWARDS[cls] = _forward_of(cls)
        forward = _FORWARDS[cls]
        module.__dict__["_meshplan_duties"] = duties
        if "forward" in module.__dict__:  # an instance's own forward would hide the class's
            module.__dict__["_meshplan_forward"] = module.__dict__.pop("forward")
    if sleeps or duties is not None:
        key = (cls, duties is not None, sleeps)
        if key not in _CALLS:
            told = cls.__call__ if duties is None else _call_of(cls.__call__)
            _CALLS[key] = sleeping(told) if sleeps else told
        call = _CALLS[key]
    module.__dict__["_meshplan_views"] = dict(views)
    if forward is not None or call is not None or views:
        reclass(module, lowered_class(cls, tuple(views), forward, call))


def reclass(module: nn.Module, new: type) -> None:
    """Change the class of `module` to `new`, under whatever subclass (FSDP2's) was put on top of an earlier one."""
    top = type(module)
    if "_meshplan_base" in top.__dict__ or not hasattr(top, "_meshplan_base"):
        module.__class__ = new
        return
    bases = tuple(new if "_meshplan_base" in b.__dict__ else b for b in top.__bases__)
    module.__class__ = type(
        top.__name__, bases, {k: v for k, v in top.__dict__.items() if k not in ("__dict__", "__weakref__")}
    )


def in_step(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with parameters shown as local tensors while it runs."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        Step.enter()
        try:
            return call(*args, **kwargs)
        finally:
            Step.leave()

    return run
