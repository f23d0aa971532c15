"""Do modules that are taken for experts keep the contract? Each kind is run with numbers: whole, and as ranks would run it.

What is asked is that the module gives the weighted sum of its experts' results, that an expert treats each row by itself, and
that the module computes with a part of the experts when its parameters hold a part. Parameters of any size are made of one
expert's numbers: expert e has those that begin e places on in one array.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshplan.compiler.capture import Trace
from meshplan.compiler.experts import ExpertsAt, Found
from meshplan.errors import PlanError
from meshplan.ops.experts.call import Routed, experts_call

ROWS = 5
"""Tokens that are tried; one of them goes to the first expert of a rank and to the last of another."""
TIGHT, LOOSE = 1e-9, 1e-4
"""Largest relative distance, where float64 runs and where only float32 does."""


def check_experts(routed: ExpertsAt, model: nn.Module, trace: Trace) -> tuple[ExpertsAt, list[str]]:
    """`routed` with, for each module, the attributes that count its experts, and what was not run, as text.

    Raises PlanError `experts-contract` for a module that is no such sum of experts.
    """
    checked, skipped, known = dict(routed.modules), [], {}
    for call in trace.calls:
        if call.func is not experts_call:
            continue
        tokens, indices = (trace.values[v] for v in call.ins[:2])
        found = routed.modules[call.module]
        module = model.get_submodule(call.module)
        kind = _kind(module, tokens.shape[1], indices.shape[1])
        if kind not in known:
            known[kind] = _sizes(found, module, tokens.shape[1], indices.shape[1], routed.view.degree("ep"))
        if known[kind] is None:
            skipped.append(f"experts of {call.module} (it holds buffers without values)")
    for path, found in routed.modules.items():
        module = model.get_submodule(path)
        held = next((sizes for kind, sizes in known.items() if kind[0] == _kind(module, 0, 0)[0]), None)
        checked[path] = found if held is None else replace(found, sizes=held)
    return replace(routed, modules=checked), skipped


def _kind(module: nn.Module, width: int, k: int) -> tuple[object, ...]:
    plain = tuple((key, v) for key, v in sorted(module.__dict__.items()) if type(v) in (int, float, bool, str))
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return ((type(module), plain, shapes), width, k)


def _sizes(found: Found, module: nn.Module, width: int, k: int, ranks: int) -> tuple[str, ...] | None:
    """The attributes that have to change with the number of experts held; None where nothing could be run."""
    if any(b.is_meta for b in module.buffers()):
        return None
    worst: PlanError | None = None
    for sizes in dict.fromkeys((found.sizes, *((name,) for name in found.sizes), ())):
        try:
            _try(replace(found, sizes=sizes), module, width, k, ranks)
            return sizes
        except PlanError as error:
            worst = worst or error
    assert worst is not None
    raise worst


def _try(found: Found, module: nn.Module, width: int, k: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    local = found.experts // ranks
    # The first and the last expert of every rank that a token can reach, and any.
    edges = [e for r in range(ranks) for e in (r * local, (r + 1) * local - 1)]
    rows = [torch.randperm(found.experts, generator=generator)[:k] for _ in range(ROWS - 1)]
    first = torch.tensor((list(dict.fromkeys(edges)) + [e for e in range(found.experts) if e not in edges])[:k])
    indices = torch.stack([first, *rows])
    for dtype, allowed in ((torch.float64, TIGHT), (torch.float32, LOOSE)):
        x = torch.randn((ROWS, width), generator=generator, dtype=dtype)
        weights = torch.rand((ROWS, k), generator=generator, dtype=dtype) + 0.1
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                whole = _copy(module, found, dtype, 0, found.experts).forward(x, indices, weights)
                parts = list(_parts(module, found, dtype, x, indices, weights, ranks))
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
    module: nn.Module, found: Found, dtype: torch.dtype, x: Tensor, indices: Tensor, weights: Tensor, ranks: int
) -> Iterator[Tensor]:
    """What each rank's experts add to the result."""
    local = found.experts // ranks
    for r in range(ranks):
        mine = _copy(module, found, dtype, r * local, local) if found.packed else _copy(module, found, dtype, 0, found.experts)
        own = Routed(mine, found.path, found.experts, found.sizes)
        held, first = (local, 0) if found.packed else (found.experts, r * local)
        slots = [(indices == e).nonzero() for e in range(r * local, (r + 1) * local)]
        at = torch.cat(slots)
        y = own.body(held, first)(x[at[:, 0]], tuple(len(s) for s in slots))
        yield torch.zeros_like(x).index_add(0, at[:, 0], y * weights[at[:, 0], at[:, 1], None])


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
