"""What each recorded torch call of a run gave, and the gradients its results got: of one device, and of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler.capture import is_in_place, is_recorded, name_of
from meshplan.compiler.frames import positional_names
from meshplan.runtime.editing import BoundEdit, FlexEditing
from meshplan.runtime.module import Duties, install


@dataclass
class Entry:
    """One call: its function, its results as they were then, and the gradients of those that had one (by result).
    `unset` results look at memory that was made empty, and may hold anything; `handed` are results that are an argument."""

    name: str
    outs: list[Tensor]
    unset: bool = False
    handed: tuple[int, ...] = ()
    grads: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Log:
    """The calls of one forward, in order. `open` is False once backward begins: what recompute repeats is not new."""

    entries: list[Entry] = field(default_factory=list)
    open: bool = True
    empty: dict[int, Tensor] = field(default_factory=dict)

    def add(self, func: Any, args: Any, out: Any) -> None:
        """Note a call that has just run."""
        if not self.open:
            return
        in_place = is_in_place(func)
        written = args[0] if in_place else out
        made = [o for o in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(o, Tensor)]
        name = name_of(func)
        if "empty" in name:
            self.empty |= {compat.storage_key(o): o for o in made}
        unset = not in_place and any(compat.storage_key(o) in self.empty for o in made)
        given = {id(x) for x in compat.flatten(args)[0]}
        # What comes back as it was handed has the gradient of all uses of both; elsewhere it may have been moved or copied.
        handed = tuple(k for k, o in enumerate(made) if id(o) in given)
        entry = Entry(name, [o.detach().clone() for o in made], unset, handed)
        self.entries.append(entry)
        for k, o in enumerate(made):
            # What is written in place is one object with two values, and so two gradients.
            if o.requires_grad and not o.is_leaf and not in_place and k not in handed:
                o.register_hook(partial(_keep, entry, k))


def _keep(entry: Entry, k: int, grad: Tensor | None) -> None:
    if grad is not None:  # some operators give nothing where the gradient is zero
        entry.grads[k] = grad.detach().clone()


class Values(TorchFunctionMode):
    """Logs the calls of the single-device program, as `compiler.capture` records them."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if is_recorded(func, out):
            self.log.add(func, args, out)
        return out


class Watching(FlexEditing):
    """Edits as `FlexEditing` does, and logs every call of the module with the result its edit gave it."""

    def __init__(self, edits: Mapping[int, BoundEdit], log: Log) -> None:
        super().__init__(edits)
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = self.ordinal
        out = super().__torch_function__(func, types, args, kwargs)
        if self.ordinal != before:
            self.log.add(func, args, out)
        return out


def watch(model: nn.Module, log: Log) -> None:
    """Make every module of a model with a program on it log its own calls: not what the program does around them."""
    for path, module in model.named_modules():
        duties = module.__dict__.get("_meshplan_duties")
        if duties is None:
            duties = Duties(path, positions={name: i for i, name in enumerate(positional_names(module))})
        edits = duties.edits if duties.edits is not None else {}
        watched = replace(duties, edits=edits, editing=partial(Watching, log=log))
        install(module, watched, module.__dict__.get("_meshplan_views", {}), sleeps=True)
