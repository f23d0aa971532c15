"""Everything the compiler would run on shards for one torch call, each held against one device by value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshplan import compat
from meshplan.compiler.capture import Call, Ref, Trace, is_in_place
from meshplan.compiler.check_values import refute
from meshplan.compiler.kinds import A, Kind, P, R
from meshplan.compiler.strategies import Chooser
from meshplan.compiler.uses import Decided, Use, use_of
from meshplan.mesh.build import abstract_groups
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard


def f(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor argument that gradients flow to."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def mask(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device="meta")


def record(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Call, Trace]:
    """The call as the compiler records it, on tensors without values."""
    leaves, structure = compat.flatten((args, kwargs))
    values = [x for x in leaves if isinstance(x, Tensor)]
    numbered = [Ref(next(i for i, v in enumerate(values) if v is x)) if isinstance(x, Tensor) else x for x in leaves]
    in_place = is_in_place(func)
    given, named = args, kwargs
    if in_place:
        given, named = compat.unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], structure)
    out = func(*given, **named)
    made = given[0] if in_place else out
    outs = [o for o in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(o, Tensor)]
    numbers = tuple(range(len(values), len(values) + len(outs)))
    call = Call(0, func, tuple(numbered), structure, numbers, "", 0, None, in_place)
    return call, Trace(calls=[call], values=[*values, *outs])


def accepted(
    func: Callable[..., Any], *args: Any, n: int, held: dict[int, list[Kind]] | None = None, **kwargs: Any
) -> Iterator[Use]:
    """Every use of the call on an axis of `n` ranks that needs no redistribution: each tensor argument as R, P, A and
    sharded on each dim, in all combinations; `held` replaces the kinds tried for an argument."""
    call, trace = record(func, *args, **kwargs)
    chooser = Chooser(trace, abstract_groups(MeshSpec((("tp", n),)), 0))
    tensors = [trace.values[v] for v in call.ins]
    tried = [
        (held or {}).get(k, [R, *(Shard(d) for d in range(t.dim())), *((P, A) if t.is_floating_point() else ())])
        for k, t in enumerate(tensors)
    ]
    for kinds in itertools.product(*tried):
        if all(k == R for k in kinds):
            continue
        requires = [t.requires_grad for t in tensors]
        choice = chooser.choose(call, kinds, [True] * len(kinds), n, requires)
        if choice is None or any(w is not None and w != R for w in choice.wanted):
            continue
        if any(w == R and k != R for w, k in zip(choice.wanted, kinds, strict=True)):
            continue
        outs = tuple(Shard(k.dim % trace.values[v].dim(), k.parts) if isinstance(k, Shard) else k
                     for k, v in zip(choice.outs, call.outs, strict=True))  # fmt: skip
        ins, made = tuple((k,) for k in kinds), tuple((k,) for k in outs)
        use = use_of(Decided(call, ins, made, (choice.strategy.replace,)), 0, n, trace)
        if use is not None:
            yield use


def wrong(uses: Iterator[Use]) -> list[str]:
    """What is refuted, as text; empty when every use holds."""
    found = []
    for use in uses:
        verdict = refute(use)
        if verdict is not None:
            found.append(f"{use.name} {use.leaves} {use.ins} -> {use.outs}: {verdict.what} {verdict.distance:.1e}")
    return found


def kinds_of(func: Callable[..., Any], *args: Any, n: int = 2, **kwargs: Any) -> set[tuple[str, ...]]:
    """What is accepted, as text: `("S(0)", "R", "->", "S(0)")`."""
    return {(*map(str, u.ins), "->", *map(str, u.outs)) for u in accepted(func, *args, n=n, **kwargs)}
