"""Which modules are running, what each was handed, and where every tensor last crossed a module's boundary."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshplan import compat


@dataclass
class Frame:
    """One running invocation of a module: its path, a serial number, its tensor inputs by identity, and how many modules it
    has called."""

    path: str
    serial: int
    inputs: dict[int, str] = field(default_factory=dict)
    children: int = 0


def argument_keys(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of (args, kwargs): forward's own argument names, with key paths inside containers."""
    names = positional_names(module)
    keys: list[str] = []
    for i, arg in enumerate(args):
        base = names[i] if i < len(names) else str(i)
        keys += [f"{base}.{path}" if path else base for path, _ in compat.flatten_with_path(arg)]
    for name, arg in kwargs.items():
        keys += [f"{name}.{path}" if path else name for path, _ in compat.flatten_with_path(arg)]
    return keys


_NAMES: dict[type, list[str]] = {}


def positional_names(module: nn.Module) -> list[str]:
    cls = type(module)
    if cls not in _NAMES:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(cls.forward).parameters.values()
        _NAMES[cls] = [p.name for p in parameters if p.kind in kinds][1:]
    return _NAMES[cls]


class Frames:
    """The stack of frames, and the module output each tensor came from."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.produced: dict[int, tuple[str, str, int]] = {}
        self._serial = 0

    def enter(self, path: str) -> Frame:
        self._serial += 1
        frame = Frame(path, self._serial)
        self.stack.append(frame)
        return frame

    def leave(self) -> Frame:
        return self.stack.pop()

    def snapshot(self) -> tuple[Frame, ...]:
        return tuple(self.stack)

    def forget(self, written: Collection[int]) -> None:
        """These tensors are no longer what the modules that run were handed, or what their children returned."""
        for frame in self.stack:
            frame.inputs = {t: key for t, key in frame.inputs.items() if t not in written}
        self.produced = {t: by for t, by in self.produced.items() if t not in written}

    def output_of(self, t: Tensor) -> tuple[str, str] | None:
        """(module path, output key) if `t` was returned to the running module's own code by one of its children."""
        found = self.produced.get(id(t))
        if found and self.stack and found[2] == self.stack[-1].serial:
            return found[0], found[1]
        return None


def common_host(t: Tensor, a: tuple[Frame, ...], b: tuple[Frame, ...]) -> tuple[str, str] | None:
    """The deepest invocation shared by two stacks that was handed `t`: (module path, argument key)."""
    host = None
    for x, y in zip(a, b, strict=False):
        if x.serial != y.serial:
            break
        if id(t) in x.inputs:
            host = (x.path, x.inputs[id(t)])
    return host
