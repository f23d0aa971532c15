"""Do modules that are taken for experts keep the contract? Each kind is run with numbers: whole, and as ranks would run it.

What is asked is that the module gives the weighted sum of its experts' results, that an expert treats each row by itself, and
that the module computes with a part of the experts when its parameters hold a part. Parameters of any size are made of one
expert's numbers: expert e has those that begin e places on in one array.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from meshplan.compiler.capture import Trace
from meshplan.compiler.experts import ExpertsAt
from meshplan.compiler.experts_found import Found
from meshplan.compiler.experts_kind import Kind, kind_of
from meshplan.compiler.experts_mlp import mlp_of
from meshplan.errors import PlanError
from meshplan.ops.experts.call import Routed, experts_call
from meshplan.ops.experts.contract import Routing
from meshplan.plan.placements import Partial, Shard

ROWS = 5
"""Tokens that are tried; one of them goes to the first expert of a rank and to the last of another."""
TIGHT, LOOSE = 1e-9, 1e-4
"""Largest relative distance, where float64 runs and where only float32 does."""


def check_experts(routed: ExpertsAt, model: nn.Module, trace: Trace, check: bool) -> tuple[ExpertsAt, list[str]]:
    """`routed` with what is found out by trying, for each module: the attributes that count its experts, and how etp splits its
    parameters. And what was not run, as text.

    Arguments:
        check: whether to refuse what does not hold; without it only what etp has to know is tried.

    Raises PlanError `experts-contract` for a module that is no such sum of experts, `experts-split` for one of whose parameters
    no split over etp was found.
    """
    view, checked, skipped = routed.view, dict(routed.modules), []
    tried: dict[Kind, Found | None] = {}
    for call in trace.calls:
        if call.func is not experts_call or not (check or view.degree("etp") > 1):
            continue
        tokens, indices = (trace.values[v] for v in call.ins[:2])
        found, module = routed.modules[call.module], model.get_submodule(call.module)
        width, k = tokens.shape[1], indices.shape[1]
        kind = (kind_of(module), width, k, view.degree("ep"), view.degree("etp"), routed.section.dispatch == "fused")
        if kind not in _known:
            _known[kind] = _tried(found, module, *kind[1:])
        tried[kind[0]] = _known[kind]
        if _known[kind] is None:
            skipped.append(f"experts of {call.module} (it holds buffers without values)")
    for path, found in routed.modules.items():
        one = None if found.block is not None else tried.get(kind_of(model.get_submodule(path)))
        if one is not None:
            checked[path] = replace(found, sizes=one.sizes, inner=one.inner, mlp=one.mlp)
    return replace(routed, modules=checked), skipped


_known: dict[tuple[Kind, int, int, int, int, bool], Found | None] = {}
"""Outcomes of this process: a second lowering, or one of other inputs, does not try again. What was refused is not kept."""


def _tried(
    found: Found, module: nn.Module, width: int, k: int, ranks: int, etp: int, fused: bool
) -> Found | None:
    """`found`, completed; None where nothing could be run."""
    if any(b.is_meta for b in module.buffers()):
        return None
    worst: PlanError | None = None
    for sizes in dict.fromkeys((found.sizes, *((name,) for name in found.sizes), ())):
        one = replace(found, sizes=sizes)
        try:
            _try(one, module, width, k, ranks, 1, ROWS)
        except PlanError as error:
            worst = worst or error
            continue
        if etp > 1:
            return _split(one, module, width, etp)
        if not (fused and found.packed):
            return one
        return replace(one, mlp=mlp_of(partial(_copy, module, one, first=0, number=found.experts), found.experts, width))
    assert worst is not None
    raise worst


def _split(found: Found, module: nn.Module, width: int, etp: int) -> Found:
    """`found` with its parameters split over `etp` ranks: of the ways that sum up to the whole, the one that holds least."""
    names = [name.rpartition(".")[2] for name in found.packed]
    shapes = [tuple(module.get_parameter(name).shape) for name in names]
    ways = sorted(product(*(_ways(shape, etp) for shape in shapes)), key=lambda way: _held(way, shapes, etp))
    for way in ways:
        inner = tuple((name, w) for name, w in zip(names, way, strict=True) if w is not None)
        if any(isinstance(w, Shard) for w in way):
            try:
                _try(replace(found, inner=inner), module, width, 1, 1, etp, 1)
                return replace(found, inner=inner)
            except PlanError:
                continue
    raise PlanError(
        f"no split of the parameters of {found.path or 'the model'} over etp {etp} gives summands of its result",
        code="experts-split", module=found.path, legal="etp: 1, or experts whose inner width divides by it",
    )  # fmt: skip


def _ways(shape: tuple[int, ...], n: int) -> list[Shard | Partial | None]:
    """Dims split at once or half by half (gate beside up), on the first rank alone, or whole; dim 0 has the experts."""
    found: list[Shard | Partial | None] = [Partial(), None]
    for d in range(1, len(shape)):
        if shape[d] % n == 0:
            found.append(Shard(d))
        if shape[d] % (2 * n) == 0:
            found.append(Shard(d, (shape[d] // 2,) * 2))
    return found


def _held(way: Sequence[Shard | Partial | None], shapes: Sequence[tuple[int, ...]], n: int) -> float:
    return sum(math.prod(s) / (n if isinstance(w, Shard) else 1) for w, s in zip(way, shapes, strict=True))


def _try(found: Found, module: nn.Module, width: int, k: int, ranks: int, etp: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    local = found.experts // ranks
    # The first and the last expert of every rank that a token can reach, and any.
    edges = [e for r in range(ranks) for e in (r * local, (r + 1) * local - 1)]
    rows = [torch.randperm(found.experts, generator=generator)[:k] for _ in range(count - 1)]
    first = torch.tensor((list(dict.fromkeys(edges)) + [e for e in range(found.experts) if e not in edges])[:k])
    indices = torch.stack([first, *rows])
    for dtype, allowed in ((torch.float64, TIGHT), (torch.float32, LOOSE)):
        x = torch.randn((count, width), generator=generator, dtype=dtype)
        weights = torch.rand((count, k), generator=generator, dtype=dtype) + 0.1
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                whole = _copy(module, found, dtype, 0, found.experts).forward(x, indices, weights)
                parts = list(_parts(module, found, dtype, Routing(x, indices, weights), ranks, etp))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if dtype == torch.float64:
                continue  # some kernels take no float64
            raise _refused(found, f"it fails on a rank's part: {type(error).__name__}: {error}") from error
        if whole.shape != x.shape:
            raise _refused(found, f"it makes {list(whole.shape)} of {list(x.shape)} tokens")
        distance = ((sum(parts) - whole).abs().max() / whole.abs().max()).item()
        if not distance <= allowed:
            raise _refused(found, f"relative distance {distance:.1e}")
        return


def _parts(
    module: nn.Module, found: Found, dtype: torch.dtype, given: Routing, ranks: int, etp: int
) -> Iterator[Tensor]:
    """What each rank's experts, or its parts of them, add to the result."""
    local = found.experts // ranks
    held = local if found.packed else found.experts
    for r, s in product(range(ranks), range(etp)):
        mine = _copy(module, found, dtype, r * local if found.packed else 0, held)
        for name, way in found.inner:
            _keep(mine.get_parameter(name), way, etp, s)
        own = Routed(mine, found.path, found.sizes)
        slots = [(given.indices == e).nonzero() for e in range(r * local, (r + 1) * local)]
        at = torch.cat(slots)
        rows = given.tokens[at[:, 0]]
        y = own.body(held, 0 if found.packed else r * local)(rows, tuple(len(slot) for slot in slots))
        yield torch.zeros_like(given.tokens).index_add(0, at[:, 0], y * given.weights[at[:, 0], at[:, 1], None])


def _keep(p: nn.Parameter, way: Shard | Partial, n: int, rank: int) -> None:
    """Leave of `p` what rank number `rank` of `n` holds."""
    if isinstance(way, Shard):
        pieces = p.data.split(list(way.parts or (p.shape[way.dim],)), way.dim)
        p.data = torch.cat([piece.chunk(n, way.dim)[rank] for piece in pieces], way.dim)
    elif rank:
        p.data = torch.zeros_like(p.data)


def _copy(module: nn.Module, found: Found, dtype: torch.dtype, first: int, number: int) -> nn.Module:
    """A copy of `module` with made-up parameters; of packed ones, those of `number` experts from `first` on."""
    memo: dict[int, object] = {}
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        shape = p.shape[1:] if found.packed else p.shape
        size = math.prod(shape)
        values = torch.randn(size + (found.experts if found.packed else 0), generator=generator, dtype=dtype) / 3
        if found.packed:
            strides = torch.empty(shape, device="meta").stride()
            values = values.as_strided((number, *shape), (1, *strides), first)
        else:
            values = values.view(shape)
        memo[id(p)] = nn.Parameter(values, requires_grad=False)
    copied = copy.deepcopy(module, memo)
    for b in copied.buffers():
        if b.is_floating_point():
            b.data = b.data.to(dtype)
    return copied


def _refused(found: Found, what: str) -> PlanError:
    return PlanError(
        f"{found.path or 'the model'} is taken for experts, and is not the weighted sum of what each expert makes of each row: "
        f"{what}", code="experts-contract", module=found.path,
        legal="out[t] = sum over j of weights[t, j] expert_(indices[t, j])(tokens[t]), without random numbers; or this module "
        "left out of experts.at: its experts then stay on every rank",
    )  # fmt: skip
