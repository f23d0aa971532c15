"""A block under construction: each line is run as it is written, so only lines that work are kept and shapes are known."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.case import Block, Step

LARGEST = 3000  # elements of a value
FAILURES = (RuntimeError, IndexError, ValueError, TypeError, AssertionError, ZeroDivisionError, NotImplementedError)


class Scope:
    """Values and members by name, and the lines so far.

    Arguments:
        rng: draws everything; a `random.Random`, or one that hypothesis shrinks.
        name: of the class; `args`: its arguments with example values.
        classes: constructors of the blocks written before.
        dropout: whether dropout may be drawn.
    """

    def __init__(self, rng: random.Random, name: str, args: dict[str, Tensor], classes: dict[str, Any]) -> None:
        self.rng, self.name, self.args, self.classes = rng, name, tuple(args), classes
        self.env: dict[str, Any] = dict(args)
        self.module = nn.Module()
        self.members: list[tuple[str, str]] = []
        self.steps: list[Step] = []
        self.setup: list[str] = []
        self.current = self.args[0]
        self.count = 0

    # -- drawing --

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, items: Any) -> Any:
        return items[self.rng.randrange(len(items))]

    def floats(self, ndim: int | None = None) -> list[str]:
        """Names of floating values with `ndim` dims (at least one if None)."""
        found = [n for n, v in self.env.items() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
        return [n for n in found if ndim is None or self.env[n].dim() == ndim]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.env[name].shape)

    def dim(self, name: str) -> int:
        """A dim of `name`, sometimes counted from the end."""
        nd = self.env[name].dim()
        d = self.rng.randrange(nd)
        return d - nd if self.chance(0.3) else d

    # -- writing --

    def member(self, made: str) -> str:
        """`self.<new attribute>` for the constructor `made`; members with equal constructors stay apart."""
        attribute = f"m{len(self.members)}"
        module = eval(made, {"torch": torch, "nn": nn, **self.classes})
        if isinstance(module, (nn.Parameter, nn.Module)):
            with torch.no_grad():
                for p in [module] if isinstance(module, nn.Parameter) else module.parameters():
                    p.data = 0.3 * torch.randn(p.shape, dtype=torch.float64) + (0.5 if p.dim() == 1 else 0.0)
        setattr(self.module, attribute, module.double() if isinstance(module, nn.Module) else module)
        self.members.append((attribute, made))
        return f"self.{attribute}"

    def buffer(self, made: str) -> str:
        """`self.<new attribute>` for a buffer."""
        attribute = f"b{len(self.setup)}"
        self.setup.append(f'self.register_buffer("{attribute}", {made})')
        exec(self.setup[-1], {"torch": torch, "self": self.module})
        return f"self.{attribute}"

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def line(self, code: str, *outs: str) -> bool:
        """Write `code`, which defines `outs`, if it runs and its values are fit to be compared."""
        space = {"torch": torch, "F": F, "nn": nn, "math": math, "self": self.module, **self.env}
        before = {n: v.clone() for n, v in self.env.items() if isinstance(v, Tensor)}
        try:
            exec(code, space)
        except FAILURES:
            self.env.update(before)
            return False
        made = {n: space[n] for n in outs}
        if not all(fit(v) for v in made.values()):
            self.env.update(before)
            return False
        self.env.update(made)
        self.steps.append(Step(outs, code))
        return True

    def let(self, expression: str) -> str | None:
        """A new name for the value of `expression`, which becomes the current one; None where it does not work."""
        name = self.new()
        if not self.line(f"{name} = {expression}", name):
            return None
        value = self.env[name]
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            self.current = name
        return name

    def block(self, returns: str) -> Block:
        """The finished block."""
        return Block(self.name, self.args, tuple(self.members), tuple(self.steps), returns, tuple(self.setup))


def fit(value: Any) -> bool:
    """Whether a value is small, finite, and not so large that rounding would show."""
    if isinstance(value, (list, tuple)):
        return all(fit(v) for v in value)
    if not isinstance(value, Tensor):
        return True
    if value.numel() > LARGEST or value.numel() == 0 or value.dim() > 5:
        return False
    return not value.is_floating_point() or bool(value.isfinite().all() and value.abs().max() < 1e3)
