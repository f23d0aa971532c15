"""Does a rule hold? One use run with numbers on one device and on all ranks of its axis, forward and backward.

No rule book is asked: inputs are laid out as their kinds say (`pieces`), each rank makes the same torch call, and the
results are put together as the result's kind says; the gradients likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan import compat
from meshplan.compiler.capture import Call, Ref, Trace
from meshplan.compiler.context import MARK, inner_of
from meshplan.compiler.kinds import Kind, N, user_letter
from meshplan.compiler.layout import Axis
from meshplan.compiler.localize import CREATED, SIZED, local_leaves
from meshplan.compiler.pieces import (
    apart,
    gather,
    gather_gradient,
    local_size,
    random,
    spread,
    spread_gradient,
    tolerance,
)
from meshplan.compiler.rules.base import Strategy
from meshplan.compiler.strategies import Chooser
from meshplan.compiler.uses import Use
from meshplan.mesh.spec import MeshSpec, hybrid_axes
from meshplan.ops.dropout import DropoutStreams
from meshplan.plan.placements import Shard
from meshplan.runtime import replace as semantic
from meshplan.runtime.simulated import SimulatedGroups, World

LOCALISED = SIZED | CREATED | {"repeat", "unflatten", "split", "split_with_sizes", "tensor_split"}
UNSET = frozenset({"empty", "new_empty", "empty_like", "new_empty_strided"})
"""Functions whose result has no values yet."""
_AXIS = "tp"  # any name: a use has one axis


@dataclass(frozen=True)
class Refuted:
    """Where the ranks differ from one device: what differs, and by how much relative to its largest value."""

    what: str
    distance: float


@dataclass(frozen=True)
class _Ran:
    """Results of one run and the gradients of its tensor arguments (None where none flows)."""

    outs: list[Tensor]
    grads: list[Tensor | None]


def refute(use: Use, seed: int = 0) -> Refuted | None:
    """Run `use` at its own shapes; what disproves it, or None. An error on a rank counts as disproof.

    Raises whatever the call itself raises on one device.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # Integers may be indices into any dim, also into one of length 1, or into what only the call itself counts (classes).
        sizes = {s for spec in use.tensors for s in spec.shape}
        limits = [min((s for s in sizes if s >= shortest), default=2) for shortest in (2, 1)]
        for limit in (*limits, 1):
            tensors = _numbers(use, generator, False, limit)
            try:
                one = _one_device(use, tensors, None)
                break
            except (RuntimeError, IndexError):
                if limit == 1:
                    raise
        if not all(torch.isfinite(o).all() for o in one.outs if o.is_floating_point()):
            tensors = _numbers(use, generator, True, limit)
            one = _one_device(use, tensors, None)
        cotangents = [random(o.shape, o.dtype, generator) if _differentiable(o) else None for o in one.outs]
        one = _one_device(use, tensors, cotangents)
        bad = [k for o, k in zip(one.outs, use.outs, strict=True) if isinstance(k, Shard) and not 0 <= k.dim < o.dim()]
        if bad:
            return Refuted(f"the result has no dim for {bad[0]}", float("inf"))
        n = use.degree
        pieces = [spread(t.detach(), kind, n, generator) for t, kind in zip(tensors, use.ins, strict=True)]
        pulls = [
            None if c is None else spread_gradient(c, kind, n, generator)
            for c, kind in zip(cotangents, use.outs, strict=True)
        ]
        local = [[local_size(o.shape, k, n, r) for o, k in zip(one.outs, use.outs, strict=True)] for r in range(n)]
        try:
            ranks = _ranks(use, tensors, one.outs, pieces, pulls, local)
        except Exception as error:
            return Refuted(f"a rank fails: {type(error).__name__}: {error}", float("inf"))
    return _compare(use, one, ranks, local)


# -- running ---------------------------------------------------------------------------------------------------------


def _one_device(use: Use, tensors: list[Tensor], cotangents: Sequence[Tensor | None] | None) -> _Ran:
    def call(args: Any, kwargs: Any) -> Any:
        own = use.replace
        if own and own.startswith(MARK):
            # Beside torch's operator, or with dropout, whose generator no rank could follow, our one-device one.
            drops = use.func is F.scaled_dot_product_attention and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            own = "attention_dropout" if drops else None
        if use.name in ("dropout", "scaled_dot_product_attention") and own:
            groups = SimulatedGroups(MeshSpec(((_AXIS, 1),)), 0)
            return _operator(replace(use, replace=own), tensors, [], (N,) * len(tensors), (N,), groups)(use.func, args, kwargs)
        return use.func(*args, **kwargs)

    return _run(use, tensors, use.leaves, use.structure, call, cotangents)


def _ranks(
    use: Use, tensors: Sequence[Tensor], outs: Sequence[Tensor], pieces: list[list[Tensor]],
    pulls: list[list[Tensor] | None], local: list[list[tuple[int, ...]]],
) -> list[_Ran]:  # fmt: skip
    world = World(use.degree)
    spec = _spec(use)

    def work(rank: int) -> _Ran:
        mine = [
            p[rank].requires_grad_(t.requires_grad) if t.requires_grad else p[rank]
            for t, p in zip(tensors, pieces, strict=True)
        ]
        call = use.func
        if use.replace:
            groups = SimulatedGroups(spec, rank, world=world)
            run = _operator(use, tensors, outs, use.ins, use.outs, groups)

            def call(*args: Any, **kwargs: Any) -> Any:
                return run(use.func, args, kwargs)

        leaves, structure = _local_arguments(use, mine, local[rank])
        mates = None if all(p is None for p in pulls) else [None if p is None else p[rank] for p in pulls]
        return _run(use, mine, leaves, structure, lambda args, kwargs: call(*args, **kwargs), mates)

    return world.run(work) if use.replace else [work(rank) for rank in range(use.degree)]


def _spec(use: Use) -> MeshSpec:
    """The mesh of the use's one axis, as its operator sees it."""
    spec, inner = MeshSpec(((_AXIS, use.degree),)), inner_of(use.replace)
    if inner is None:
        return spec
    rings, heads = hybrid_axes(_AXIS)
    return spec.split_axis(_AXIS, {rings: use.degree // inner, heads: inner})


def _run(use: Use, tensors: Sequence[Tensor], leaves: Sequence[Any], structure: Any, call: Any, pulls: Any) -> _Ran:
    given = [t.clone() for t in tensors] if use.in_place else tensors
    args, kwargs = compat.unflatten([given[x.value] if isinstance(x, Ref) else x for x in leaves], structure)
    out = call(args, kwargs)
    written = args[0] if use.in_place else out
    outs = [o for o in (written if isinstance(written, (list, tuple)) else [written]) if isinstance(o, Tensor)]
    if pulls is None:
        return _Ran(outs, [None] * len(tensors))
    pulled = [(o, g) for o, g in zip(outs, pulls, strict=True) if g is not None and o.requires_grad]
    asked = [t for t in tensors if t.requires_grad]
    found = iter(
        torch.autograd.grad([o for o, _ in pulled], asked, [g for _, g in pulled], allow_unused=True)
        if pulled and asked
        else []
    )
    return _Ran([o.detach() for o in outs], [next(found, None) if t.requires_grad else None for t in tensors])


def _local_arguments(use: Use, mine: Sequence[Tensor], local: list[tuple[int, ...]]) -> tuple[Sequence[Any], Any]:
    """The call's arguments on a rank: as they are where they give its shapes, else with its own sizes."""
    if use.name not in LOCALISED:
        return use.leaves, use.structure
    args, kwargs = use.arguments(mine)
    try:
        with torch.no_grad():
            own = [tuple(t.shape) for t in compat.flatten(use.func(*args, **kwargs))[0] if isinstance(t, Tensor)]
    except RuntimeError:
        own = []
    if own == local:
        return use.leaves, use.structure
    if use.name == "repeat":
        x, (shape,) = mine[0], local
        held = (1,) * (len(shape) - x.dim()) + tuple(x.shape)
        return compat.flatten(((use.leaves[0], *(n // max(h, 1) for n, h in zip(shape, held, strict=True))), {}))
    sizes = None
    if "split" in use.name:
        first, more = compat.unflatten(list(use.leaves), use.structure)
        dim = first[2] if len(first) > 2 else more.get("dim", 0)
        sizes = [shape[dim] for shape in local]
    return compat.flatten(tuple(local_leaves(use.name, list(use.leaves), use.structure, local, sizes)))


def _operator(
    use: Use, tensors: Sequence[Tensor], outs: Sequence[Tensor], ins: Sequence[Kind], out_kinds: Sequence[Kind],
    groups: SimulatedGroups,
) -> semantic.Run:  # fmt: skip
    """The semantic operator of the use, set up for these shapes as the compiler sets it up."""
    meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (*tensors, *outs)]
    n = len(tensors)
    call = Call(0, use.func, use.leaves, use.structure, tuple(range(n, len(meta))), "module", 0, None, use.in_place)
    chooser = Chooser(Trace(calls=[call], values=meta), groups)
    _, order = chooser.semantic_op(call)
    strategy = Strategy(tuple(ins[number] for number in order), tuple(out_kinds), use.replace)
    group = groups.group(_AXIS)
    made = chooser.replacement(
        call, {use.replace} if use.replace else set(), {_AXIS: strategy}, [Axis(_AXIS, group, False)]
    )
    assert made is not None, f"{use.name} has no operator {use.replace}"
    return semantic.bind(made.name, dict(made.settings), groups, DropoutStreams(0))


# -- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(use: Use, generator: torch.Generator, positive: bool, limit: int) -> list[Tensor]:
    """Normal values, or positive ones, and integers below `limit`."""
    made: list[Tensor] = []
    for spec in use.tensors:
        if spec.dtype == torch.bool:
            x = torch.rand(spec.shape, generator=generator) < 0.7
            if x.dim():
                x[..., 0] = True  # a row of a mask that hides everything has no softmax
        elif spec.dtype.is_floating_point or spec.dtype.is_complex:
            wide = torch.complex128 if spec.dtype.is_complex else torch.float64
            x = torch.randn(spec.shape, generator=generator, dtype=wide)
            x = (x.abs() + 0.5 if positive else x).requires_grad_(spec.grad)
        else:
            x = torch.randint(0, limit, spec.shape, generator=generator).to(spec.dtype)
            if use.func in (F.cross_entropy, F.nll_loss) and x.dim():
                x.view(-1)[: 1 + x.numel() // 4] = _ignored(use)  # the first rank counts fewer tokens than the last
        made.append(x)
    return made


def _ignored(use: Use) -> int:
    """The label that a loss does not count."""
    args, kwargs = use.arguments(range(len(use.tensors)))
    return int(kwargs.get("ignore_index", args[4] if len(args) > 4 else -100))


def _differentiable(x: Tensor) -> bool:
    return x.requires_grad and (x.is_floating_point() or x.is_complex())


# -- comparing -------------------------------------------------------------------------------------------------------


def _compare(use: Use, one: _Ran, ranks: list[_Ran], local: list[list[tuple[int, ...]]]) -> Refuted | None:
    for k, (want, kind) in enumerate(zip(one.outs, use.outs, strict=True)):
        where = f"result {k}" if len(one.outs) > 1 else "the result"
        got = [r.outs[k] for r in ranks]
        shapes = [tuple(g.shape) for g in got]
        if shapes != [sizes[k] for sizes in local]:
            return Refuted(
                f"{where} has shapes {[list(s) for s in shapes]} where {kind} says {[list(s[k]) for s in local]}",
                float("inf"),
            )
        if use.name not in UNSET:
            what = f"{where} is not {user_letter(kind)}"
            found = _differs(gather(got, kind, want.shape), want, what, tolerance(want))
            if found:
                return found
    loosest = max(map(tolerance, one.outs), default=0.0)  # a float32 result rounds what flows back through it
    for k, (full, kind) in enumerate(zip(one.grads, use.ins, strict=True)):
        if full is None:
            continue
        pulled = [r.grads[k] for r in ranks]
        parts = [
            g if g is not None else full.new_zeros(local_size(full.shape, kind, use.degree, r))
            for r, g in enumerate(pulled)
        ]
        what = f"the gradient of tensor argument {k} ({kind})"
        found = _differs(gather_gradient(parts, kind, full.shape), full, what, max(loosest, tolerance(full)))
        if found:
            return found
    return None


def _differs(got: Tensor | None, want: Tensor, what: str, allowed: float) -> Refuted | None:
    if got is None:
        return Refuted(f"{what}: ranks that should agree differ", float("inf"))
    if got.dtype != want.dtype or got.shape != want.shape:
        return Refuted(f"{what}: {got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}", float("inf"))
    distance = apart(got, want)
    return None if distance <= allowed else Refuted(what, distance)
