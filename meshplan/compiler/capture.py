"""The single-device program: one run of the unmodified forward on fake tensors at global shapes, as a list of torch calls.

This trace is the specification. Everything later is checked against it, call by call: same functions, same dataflow,
same arguments up to what the layouts change.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler.frames import argument_keys
from meshplan.compiler.repeats import (
    Equals,
    FullTraceNeeded,
    Grouped,
    Segment,
    can_stand_for_others,
    input_signature,
    like,
)
from meshplan.compiler.sketch import Sketch
from meshplan.compiler.source import call_site, raised_at
from meshplan.compiler.tracing import recording
from meshplan.errors import PlanError, Where
from meshplan.ops.attention.flex import taken_whole

# Calls whose result is not a tensor of the program, or that only ask about one.
HOST_READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "numpy", "is_nonzero", "allclose", "__array__",
}  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """A function's name; `T.__get__` for the getter of a tensor attribute."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f"{getattr(func.__self__, '__name__', '')}.__get__"  # type: ignore[attr-defined]
    return name


@dataclass(frozen=True)
class Ref:
    """A tensor in a recorded call: the id of its value and its global shape and dtype are in `Trace.values`."""

    value: int


@dataclass(frozen=True)
class Call:
    """One torch call: function, flattened arguments (tensors as `Ref`), results, and where it was made. `ordinal` counts the
    calls of one run of `module`'s own code; it is -1 in a hook."""

    index: int
    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    outs: tuple[int, ...]
    module: str
    ordinal: int
    where: Where | None
    in_place: bool

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def ins(self) -> tuple[int, ...]:
        return tuple(leaf.value for leaf in self.leaves if isinstance(leaf, Ref))


@dataclass
class Trace:
    """The calls of one forward, and every value's fake tensor at global shape (kept, so that ids stay unique).

    `entered` and `left` have the module calls in order with the values handed over, `keys` the argument names of the
    former; `ends` has, by the number of a grouped call that was traced, the number of calls recorded when it returned.
    """

    calls: list[Call] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    entered: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    keys: list[tuple[str, ...]] = field(default_factory=list)
    left: list[tuple[str, tuple[tuple[str, int], ...]]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    reads: list[tuple[str, Any]] = field(default_factory=list)
    grouped: list[Grouped] = field(default_factory=list)
    outputs: Any = None
    mode: Any = None
    asked: tuple[bool, ...] = ()  # what the model heard when it asked whether it is traced
    given: tuple[int, ...] = ()  # the model's input tensors, in order
    variable: frozenset[int] = frozenset()  # calls that make what looks like a constant, into which a value is written


class ConstantWritten(Exception):
    """The constants that `calls` make were computed for real, and a value that depends on the inputs was written into them."""

    def __init__(self, calls: frozenset[int]) -> None:
        super().__init__(calls)
        self.calls = calls


class ValueIds:
    """Names values: a tensor object has one id until something writes into it in place."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self.values: list[Tensor] = []

    def new(self, t: Tensor) -> int:
        self.values.append(t)
        self._of[id(t)] = len(self.values) - 1
        return len(self.values) - 1

    def get(self, t: Tensor) -> int:
        found = self._of.get(id(t))
        return self.new(t) if found is None else found

    def alias(self, t: Tensor, value: int) -> None:
        self._of[id(t)] = value


class ModuleStack:
    """Which module's own code is running, and how many recorded calls it has made in this invocation."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._ordinals: list[int] = []
        self._hooks: list[int] = []  # how deep the stack was where each user's hook that runs began

    def enter(self, path: str) -> None:
        self.paths.append(path)
        self._ordinals.append(0)

    def leave(self) -> None:
        self.paths.pop()
        self._ordinals.pop()

    def hooked(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The user's `hook`, whose calls count for no module: a rank's edits sleep while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._hooks.append(len(self.paths))
            try:
                return hook(*args, **kwargs)
            finally:
                self._hooks.pop()

        return run

    @property
    def ordinal(self) -> int:
        """The ordinal of the call that is about to be made."""
        return -1 if self._hooks and self._hooks[-1] == len(self.paths) else self._ordinals[-1]

    def next_ordinal(self) -> int:
        found = self.ordinal
        if found >= 0:
            self._ordinals[-1] += 1
        return found

    @property
    def path(self) -> str:
        return self.paths[-1] if self.paths else ""


def is_recorded(func: Callable[..., Any], out: Any) -> bool:
    """Whether a call is part of the program: it made a tensor, or wrote into one."""
    if getattr(func, "__name__", "") in ("__setitem__", "_set_grad_enabled"):
        return func.__name__ == "__setitem__"
    if isinstance(out, Tensor):
        return True
    return isinstance(out, (list, tuple)) and any(isinstance(o, Tensor) for o in out)


def is_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


_IN_PLACE_DUNDERS = {
    f"__i{op}__" for op in "add sub mul truediv floordiv mod pow and or xor matmul lshift rshift div".split()
}


def host_read(func: Callable[..., Any], path: str, cause: BaseException) -> PlanError:
    where = call_site(3)
    name = getattr(func, "__name__", str(func))
    return PlanError(
        f"{path or 'the model'} reads a tensor's value on the host ({name}), so its program depends on data",
        code="host-read",
        where=where,
        module=path,
        legal="a forward whose Python code depends on shapes and constants only",
    )


def foreign_parameter(name: str, path: str) -> PlanError:
    return PlanError(
        f"{path or 'the model'} computes ({name}) with a parameter that is none of this model's: a function put in place of a "
        "forward, or kept in an attribute, holds on to the module it was made for",
        code="foreign-parameter",
        where=call_site(3),
        module=path,
        legal="a method of the module, which finds its parameters on self",
    )


_CONSTANT_LIMIT = 2**22  # elements up to which a constant is computed for real


def run_call(
    func: Callable[..., Any], args: Any, kwargs: Any, path: str, constant: bool = True, handed: list[Tensor] | None = None
) -> Any:
    """Run one torch call of the model. What depends on neither inputs nor parameters is computed for real while small, so
    that Python code which reads such constants (masks, position ids) takes the branch it takes in a real run. With
    `constant` False it stays without a value: others are written into it. `handed` are its tensors, if they are known."""
    tensors = tensors_in((args, kwargs)) if handed is None else handed
    try:
        out = None
        if constant and not any(compat.is_fake(t) for t in tensors) and getattr(func, "__name__", "") not in (
            "_set_grad_enabled",
            "__get__",
        ):
            sizes = [t.numel() for t in tensors]
            if not is_in_place(func) and getattr(func, "__name__", "") not in HOST_READS:
                out = func(*args, **kwargs)
                sizes += [t.numel() for t in tensors_in(out)]
            if all(n <= _CONSTANT_LIMIT for n in sizes):
                with compat.without_fake_mode():
                    return func(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)
    except compat.data_dependent_errors() as error:
        raise host_read(func, path, error) from error


class _Capture(TorchFunctionMode):
    def __init__(
        self, trace: Trace, ids: ValueIds, stack: ModuleStack, equals: Equals | None, sketch: Sketch | None
    ) -> None:
        super().__init__()
        self.trace, self.ids, self.stack, self.equals, self.sketch = trace, ids, stack, equals, sketch
        self.hooks: Callable[[str, nn.Module], None] = lambda path, module: None
        self.paused = False
        self.segments: dict[Any, Segment] = {}
        self._made: dict[int, list[tuple[int, Tensor]]] = {}  # constants by their memory, with the calls that made them

    def grouped(
        self, path: str, group: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the forward of a module that has equals, or let the first equal's trace stand for it."""
        inputs = compat.flatten((args, kwargs))[0]
        if not can_stand_for_others(args, kwargs):
            if path in self.equals.hollow:  # type: ignore[union-attr]
                raise FullTraceNeeded(path)
            return forward(*args, **kwargs)
        key = (group, input_signature(args, kwargs))
        first = self.segments.get(key)
        if first is None:
            number = len(self.trace.grouped)
            filled = self._filled(path, module)
            self.trace.grouped.append(Grouped(path, None, (), filled, len(self.trace.calls)))
            out = forward(*args, **kwargs)
            self.trace.ends[number] = len(self.trace.calls)
            self.segments[key] = Segment(number, path, inputs, out=out)
            return out
        self.paused = True
        out = like(first.out, first.inputs, inputs)
        self.paused = False
        outs = tuple(self.ids.get(t) for t in tensors_in(out))
        self.trace.grouped.append(Grouped(path, first.number, outs, at=len(self.trace.calls)))
        return out

    def _filled(self, path: str, module: nn.Module) -> int:
        assert self.equals is not None
        if path not in self.equals.hollow:
            return -1
        self.paused = True
        made = self.equals.fill(path, module, self.trace.mode, None, self.grouped)
        self.paused = False
        self.hooks(path, module)
        numbers = [self.ids.new(t) for t in made]
        return numbers[0] if numbers else -1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and not isinstance(seen := func(*args, **kwargs), Tensor):
            return seen  # a shape, a dtype: most of what code asks of a tensor
        leaves, structure = compat.flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        # A leaf: a constant into which the model wrote has a gradient too, and is the model's own.
        if any(not compat.is_fake(t) and t.requires_grad and t.is_leaf for t in tensors):
            raise foreign_parameter(name_of(func), self.stack.path)
        number, in_place = len(self.trace.calls), is_in_place(func)
        if in_place:
            self._written(tensors)
        run = partial(run_call, func, args, kwargs, self.stack.path, number not in self.trace.variable, tensors)
        out = self.sketch.run(run, func, leaves, structure) if self.sketch and tensors and not in_place else run()
        if not is_recorded(func, out):
            if getattr(func, "__name__", "") in HOST_READS:
                self.trace.reads.append((func.__name__, out))
            return out
        for t in (out,) if isinstance(out, Tensor) else tensors_in(out):
            if not compat.is_fake(t):
                self._made.setdefault(compat.storage_key(t), []).append((number, t))
        refs = tuple(Ref(self.ids.get(x)) if isinstance(x, Tensor) else x for x in leaves)
        written = args[0] if in_place else out
        made = [o for o in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(o, Tensor)]
        outs = tuple(
            self.ids.new(o) if in_place or id(o) not in {id(x) for x in leaves} else self.ids.get(o) for o in made
        )
        self.trace.calls.append(
            Call(
                number, func, refs, structure, outs, self.stack.path,
                self.stack.next_ordinal(), call_site(), in_place,
            )
        )  # fmt: skip
        return out

    def _written(self, tensors: list[Tensor]) -> None:
        if tensors and not compat.is_fake(tensors[0]) and any(map(compat.is_fake, tensors[1:])):
            made = self._made.get(compat.storage_key(tensors[0]), [])
            if made and made[0][0] not in self.trace.variable:  # by the first of them: the others look at its memory
                raise ConstantWritten(frozenset({made[0][0]}))


class ModuleHooks:
    """Calls `cast(path, args, kwargs)`, which gives new arguments, then `before(path, module, args, kwargs)` and
    `after(path, module, args, kwargs, out)` around every module of a compile-time copy; what they return, unless None,
    replaces the arguments or the output. The user's own hooks come before `before` and after `after`, as on a rank, where
    both are part of the forward."""

    def __init__(
        self,
        before: Callable[..., Any],
        after: Callable[..., Any],
        stack: ModuleStack,
        cast: Callable[..., tuple[Any, Any]] | None = None,
    ) -> None:
        self.before, self.after, self.stack, self.cast = before, after, stack, cast

    def on(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            self._one(path, module)

    def inside(self, path: str, module: nn.Module) -> None:
        """Hook what a hollow module was filled with."""
        for inner, child in module.named_modules():
            if inner:
                self._one(f"{path}.{inner}", child)

    def _one(self, path: str, module: nn.Module) -> None:
        for table in compat.hook_tables(module, False):
            table.update({key: self.stack.hooked(hook) for key, hook in table.items()})
        module.register_forward_pre_hook(lambda m, a, k: self._enter(path, m, a, k), with_kwargs=True)
        module.register_forward_hook(lambda m, a, k, o: self.after(path, m, a, k, o), with_kwargs=True, prepend=True)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.cast is not None:
            args, kwargs = self.cast(path, args, kwargs)
        replaced = self.before(path, module, args, kwargs)
        return (args, kwargs) if replaced is None else replaced


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in compat.flatten(tree)[0] if isinstance(x, Tensor)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, which would walk a growing trace over and over: a quarter of its time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def capture(
    copied: Callable[[], nn.Module], mode: Any, kwargs: dict[str, Any], equals: Equals | None = None,
    inputs_of: Callable[..., tuple[Any, Any]] | None = None, sketch: Sketch | None = None,
) -> tuple[nn.Module, Trace]:  # fmt: skip
    """Run a fake copy of the model once on fake global inputs and record its torch calls; returns the copy too. Of modules
    that are `equals`, those that are handed like inputs are traced once. `inputs_of(path, args, kwargs, alias)`, if given,
    casts the arguments of modules: see `Precision.inputs`. With `sketch` values do not hold together as in a run.

    Raises PlanError `host-read` where the program depends on tensor values.
    """
    variable: frozenset[int] = frozenset()
    while True:
        skeleton = copied()
        try:
            return skeleton, _captured(skeleton, mode, kwargs, equals, inputs_of, sketch, variable)
        except ConstantWritten as found:
            variable |= found.calls


def _captured(
    skeleton: nn.Module, mode: Any, kwargs: dict[str, Any], equals: Equals | None, inputs_of: Any, sketch: Sketch | None,
    variable: frozenset[int],
) -> Trace:  # fmt: skip
    trace, ids, stack = Trace(mode=mode, variable=variable), ValueIds(), ModuleStack()

    def before(path: str, module: nn.Module, a: Any, k: Any) -> None:
        trace.entered.append((path, tuple(ids.get(t) for t in tensors_in((a, k)))))
        named = zip(argument_keys(module, a, k), compat.flatten((a, k))[0], strict=True)
        trace.keys.append(tuple(key for key, t in named if isinstance(t, Tensor)))
        stack.enter(path)

    def after(path: str, module: nn.Module, a: Any, k: Any, out: Any) -> None:
        keyed = compat.flatten_with_path(out)
        trace.left.append((path, tuple((key, ids.get(t)) for key, t in keyed if isinstance(t, Tensor))))
        stack.leave()

    for t in [*skeleton.parameters(), *skeleton.buffers()]:
        ids.get(t)
    trace.given = tuple(ids.get(t) for t in tensors_in(kwargs))

    def cast(path: str, a: Any, k: Any) -> tuple[Any, Any]:
        return inputs_of(path, a, k, lambda new, old: ids.alias(new, ids.get(old))) if inputs_of else (a, k)

    recorder, hooks = _Capture(trace, ids, stack, equals, sketch), ModuleHooks(before, after, stack, cast)
    recorder.hooks = hooks.inside
    hooks.on(skeleton)
    if equals is not None:
        equals.intercept(skeleton, recorder.grouped)
    with _uncollected(), mode, compat.on_cpu(), recorder, recording() as asked, compat.taking_flex(taken_whole()):
        try:
            out = skeleton(**kwargs)
        except PlanError as error:
            if error.code == "flex-attention" and error.module is None:
                raise error.at(raised_at(error), stack.path) from error
            raise
    trace.asked = tuple(asked)
    trace.values = ids.values
    leaves, structure = compat.flatten(out)
    trace.outputs = ([Ref(ids.get(x)) if isinstance(x, Tensor) else x for x in leaves], structure)
    return trace
