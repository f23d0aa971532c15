"""Equal layers are traced once: which modules of a list are alike, and how one's trace stands for the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.bind import Bound
from meshplan.compiler.kinds import Kind
from meshplan.compiler.reach import sources
from meshplan.plan.patterns import within

if TYPE_CHECKING:
    from meshplan.compiler.capture import Call, Trace

_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)


def equal_layers(model: nn.Module, bound: Bound, kinds: Mapping[str, list[Kind]]) -> tuple[dict[str, int], bool]:
    """Modules of a ModuleList or Sequential that are alike in everything tracing can see: class, attributes, parameters with
    their layouts, buffers, children, hooks and rules. Their paths, with the number of the class of equals they are in.

    An attribute that is not plain data counts by identity, so what cannot be compared is taken for different. One that is each
    module's own place in its list (`layer_idx`) counts as equal; the second result is whether there is such a one, on which
    forward may depend: see `confirmed`. A module that shares a parameter with what is outside it is no one's equal: it cannot
    be left out of the copy that is traced while others run what it holds.
    """
    params = {id(p): name for name, p in model.named_parameters()}
    keys: dict[str, Any] = {}
    numbered = False
    for path, parent in model.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len(parent) > 1:
            places = _places(parent)
            numbered |= bool(places)
            if any(within(path, experts) for experts in bound.experts):
                continue  # called as one with the module that holds them
            for name, child in parent.named_children():
                inner = f"{path}.{name}" if path else name
                if not _shares(child, inner, bound, params):
                    keys[inner] = _describe(child, inner, "", bound, kinds, params, places)
    return shared_keys(keys), numbered


def _shares(m: nn.Module, path: str, bound: Bound, params: Mapping[int, str]) -> bool:
    names = (name for p in m.parameters() for name in bound.params[params[id(p)]].names)
    return any(not name.startswith(f"{path}.") for name in names)


def shared_keys(keys: Mapping[str, Any]) -> dict[str, int]:
    """The paths whose key another path has too, each with a number for its key."""
    counts = Counter(keys.values())
    numbers: dict[Any, int] = {}
    return {path: numbers.setdefault(key, len(numbers)) for path, key in keys.items() if counts[key] > 1}


def _places(parent: nn.Module) -> frozenset[tuple[str, str]]:
    """Attributes (path within the child, name) that in every child that has them are the child's place in `parent`."""
    found: dict[tuple[str, str], bool] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for at, child in enumerate(parent.children()):
        for inner, m in child.named_modules():
            for key, value in m.__dict__.items():
                if type(value) is int:
                    found[inner, key] = found.get((inner, key), True) and value == at
                    seen[inner, key] += 1
    return frozenset(key for key, always in found.items() if always and seen[key] > 1)


def _describe(
    m: nn.Module, path: str, relative: str, bound: Bound, kinds: Mapping[str, list[Kind]], params: Mapping[int, str],
    places: frozenset[tuple[str, str]],
) -> Any:  # fmt: skip
    own = []
    for key, value in sorted(m.__dict__.items()):
        if key in ("_parameters", "_buffers", "_modules"):
            continue
        own.append((key, "its place" if (relative.lstrip("."), key) in places else _attribute(value)))
    weights: list[Any] = []
    for name, p in m._parameters.items():
        if p is None:
            weights.append((name, None))
            continue
        canonical = params[id(p)]
        tied = canonical if len(bound.params[canonical].names) > 1 else ""
        weights.append((name, (tuple(p.shape), p.dtype, p.requires_grad, tuple(map(str, kinds[canonical])), tied)))
    buffers = [(name, None if b is None else (tuple(b.shape), b.dtype)) for name, b in m._buffers.items()]
    rule = bound.modules.get(path)
    layouts = (repr(rule.input), repr(rule.output)) if rule else None
    children = [
        (
            name,
            _describe(c, f"{path}.{name}", f"{relative}.{name}", bound, kinds, params, places)
            if c is not None
            else None,
        )
        for name, c in m._modules.items()
    ]
    return (type(m), tuple(own), tuple(weights), tuple(buffers), layouts, tuple(children))


def confirmed(groups: Mapping[str, int], trace: Trace) -> dict[str, int]:
    """Of `groups`, those whose modules make the same calls in `trace`, which has every module's: the same functions on tensors
    of the same shapes with the same other arguments, dataflow included. A module that does not is no one's equal."""
    made: dict[str, list[Any]] = {path: [] for path in groups}
    local: dict[str, dict[int, int]] = {path: {} for path in groups}
    for call in trace.calls:
        for path in _holding(call.module, made):
            made[path].append(_normalised(call, call.module[len(path) :], trace, local[path]))
    keys = {path: (group, tuple(made[path])) for path, group in groups.items()}
    return shared_keys(keys)


def _holding(module: str, paths: Mapping[str, Any]) -> list[str]:
    parts = module.split(".")
    return [p for i in range(1, len(parts) + 1) if (p := ".".join(parts[:i])) in paths]


def _normalised(call: Call, relative: str, trace: Trace, numbers: dict[int, int]) -> Any:
    """A call with its tensors numbered by first appearance in its module, and everything else as it prints."""

    def tensor(value: int) -> Any:
        t = trace.values[value]
        return (numbers.setdefault(value, len(numbers)), tuple(t.shape), t.dtype, t.requires_grad)

    leaves = tuple(tensor(x.value) if hasattr(x, "value") else repr(x) for x in call.leaves)
    return (relative, call.func, leaves, call.structure, tuple(map(tensor, call.outs)))


def _attribute(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(_attribute, value)))
    if isinstance(value, (dict, set)) and not value:
        return type(value)
    if isinstance(value, dict):
        return (type(value), tuple((_attribute(k), _attribute(v)) for k, v in value.items()))
    return (type(value), id(value))


class FullTraceNeeded(Exception):
    """The module at `path` turned out to be handed other tensors on a rank than the equal that stands for it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def apart(groups: Mapping[str, int], path: str) -> dict[str, int]:
    """`groups` with the module at `path` and its equals after it as a group of their own."""
    number, fresh = groups.get(path), max(groups.values(), default=0) + 1
    order = list(groups)
    if number is None or (groups and order.index(path) == [groups[p] for p in order].index(number)):
        return {}
    at = order.index(path)
    out = {p: fresh if n == number and i >= at else n for i, (p, n) in enumerate(groups.items())}
    sizes = Counter(out.values())
    return {p: n for p, n in out.items() if sizes[n] > 1}


@dataclass(frozen=True)
class Grouped:
    """One call of a grouped module: traced itself (`of` None) or standing on the call number `of`; `outs` are its values.
    `first_value` numbers the parameters of a hollow module that had to be filled to be traced, -1 for others. `at` is the
    number of calls recorded before it."""

    path: str
    of: int | None
    outs: tuple[int, ...]
    first_value: int = -1
    at: int = 0


@dataclass
class Segment:
    """What one traced call of a grouped module was handed and gave."""

    number: int
    path: str
    inputs: list[Any]
    given: Any = None
    out: Any = None
    start: int = 0
    end: int = 0
    infos: list[Any] = field(default_factory=list)


def can_stand_for_others(args: Any, kwargs: Any) -> bool:
    """Whether a module handed these arguments does nothing but return: an object among them, such as a cache of keys and
    values, may be written to, which the equals of a traced module would not do."""
    if isinstance(args, (tuple, list)) and type(args) in (tuple, list):
        return all(can_stand_for_others(x, {}) for x in args) and (not kwargs or can_stand_for_others(kwargs, {}))
    if type(args) is dict:
        return all(can_stand_for_others(x, {}) for x in args.values())
    return isinstance(args, (Tensor, torch.Size, *_PLAIN))


def input_signature(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What a module is handed, as far as its trace depends on it: shapes, dtypes, gradients, constants, and which are equal."""
    leaves, structure = compat.flatten((args, kwargs))
    seen: dict[int, int] = {}
    described: list[Any] = []
    for x in leaves:
        if isinstance(x, Tensor):
            same = seen.setdefault(id(x), len(seen))
            described.append((tuple(x.shape), x.dtype, x.requires_grad, compat.is_fake(x), same))
        else:
            described.append(repr(x))
    return (str(structure), *described)


def like(out: Any, old_inputs: list[Any], new_inputs: list[Any]) -> Any:
    """An output of the same shape as `out`: inputs that were passed through are the new inputs, other tensors are fresh, and
    their gradients go to the inputs that those of `out` go to."""
    leaves, structure = compat.flatten(out)
    given = [(x, new) for x, new in zip(old_inputs, new_inputs, strict=True) if isinstance(x, Tensor)]
    return compat.unflatten([_fresh(x, given) if isinstance(x, Tensor) else x for x in leaves], structure)


def _fresh(x: Tensor, given: list[tuple[Tensor, Tensor]]) -> Tensor:
    for old, new in given:
        if old is x:
            return new
    came = sources(x, [old for old, _ in given]) if x.requires_grad else [False] * len(given)
    return fresh(x, [new for (_, new), comes in zip(given, came, strict=True) if comes])


def fresh(x: Tensor, inputs: list[Tensor]) -> Tensor:
    """A tensor like `x` without values, whose gradient, if `x` has one, goes to `inputs`."""
    if not x.requires_grad:
        return _bare(x)
    # Either way not a leaf, since the model may write into it.
    made: Tensor = _StandIn.apply(x, *inputs) if inputs else _bare(x).requires_grad_().clone()  # type: ignore[no-untyped-call]
    return made


def _bare(x: Tensor) -> Tensor:
    return compat.fake_like(x) if compat.is_fake(x) else torch.empty_like(x, requires_grad=False)


class _StandIn(torch.autograd.Function):
    """What a layer that was not run returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return _bare(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a layer that was not run has no backward")


class Equals:
    """The groups of equal modules of one model, and the means to trace any one of them in a skeleton that holds only the
    first of each group in full."""

    def __init__(self, model: nn.Module, groups: Mapping[str, int]) -> None:
        self.groups = dict(groups)
        self.originals = {path: model.get_submodule(path) for path in groups}
        first: dict[int, str] = {}
        for path, group in groups.items():
            first.setdefault(group, path)
        kept = set(first.values())
        self.hollow = {
            path: m for path, m in self.originals.items() if path not in kept and not _inside(path, self.groups, kept)
        }

    def intercept(self, skeleton: nn.Module, handle: Callable[..., Any]) -> None:
        """Let `handle(path, group, module, forward, args, kwargs)` run the forwards of the skeleton's grouped modules."""
        for path, group in self.groups.items():
            try:
                module = skeleton.get_submodule(path)
            except AttributeError:  # inside a hollow one
                continue
            self._wrap(path, group, module, handle)

    def _wrap(self, path: str, group: int, module: nn.Module, handle: Callable[..., Any]) -> None:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            return handle(path, group, module, forward, args, kwargs)

        module.forward = run  # type: ignore[method-assign]

    def fill(self, path: str, module: nn.Module, mode: Any, shape_of: Any, handle: Callable[..., Any]) -> list[Tensor]:
        """Give a hollow skeleton module its children and fake tensors; returns those tensors in order."""
        from meshplan.compiler.skeleton import fake_copy

        full = fake_copy(self.originals[path], mode, shape_of, prefix=f"{path}.")
        for key in ("_parameters", "_buffers", "_modules"):
            module.__dict__[key] = full.__dict__[key]
        for inner, group in self.groups.items():
            if inner.startswith(f"{path}."):
                self._wrap(inner, group, module.get_submodule(inner[len(path) + 1 :]), handle)
        return [*module.parameters(), *module.buffers()]


def _inside(path: str, groups: Mapping[str, int], kept: set[str]) -> bool:
    """Whether a module lies in another grouped one that is not kept in full: it is then hollow with that one."""
    return any(path.startswith(f"{outer}.") and outer not in kept for outer in groups)


def moved_path(path: str, old: str, new: str) -> str | None:
    """`path` with the prefix `old` replaced by `new`; None if it does not lie under `old`."""
    if path == old:
        return new
    return new + path[len(old) :] if path.startswith(old + ".") else None
