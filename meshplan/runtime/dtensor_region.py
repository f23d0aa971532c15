"""A region with DTensor semantics: inputs become DTensors, every call runs on them, and outputs leave as local tensors.

The slow reference, and a way out for code that needs global sizes. Layouts follow the plan and three rules: a parameter
is gathered over the data axes where it is used, a partial sum is summed before anything but a declared boundary sees
it, and a call that DTensor is not trusted with runs on replicated values (`dtensor_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from meshplan import compat
from meshplan.compiler.calls import RANDOM
from meshplan.compiler.capture import HOST_READS, is_in_place
from meshplan.errors import PlanError
from meshplan.ops.dropout import DropoutStreams
from meshplan.runtime.dtensor_calls import ELEMENTWISE, blocked_dims, only_asks, plain_name, shards_blocked
from meshplan.runtime.dtensor_dropout import drop, drop_attention

Compute = Mapping[nn.Parameter, tuple[Placement, ...]]


class _Redistribute(torch.autograd.Function):
    """`x` to `placements`; its gradient, whatever it is, to `back`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...], back: tuple[Placement, ...]) -> DTensor:
        ctx.back = back
        return _axis_by_axis(x.detach(), placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _axis_by_axis(grads[0], ctx.back), None, None


def _axis_by_axis(x: Any, placements: tuple[Placement, ...]) -> DTensor:
    """`x` with `placements`, one mesh dim at a time, since the order in which DTensor plans several is its own affair.
    What becomes whole does so from the inside out, what is cut is cut from the outside in, as nested shards need."""
    now = list(x.placements)
    whole = [i for i in reversed(range(len(now))) if placements[i].is_replicate()]
    for i in [*whole, *(i for i in range(len(now)) if i not in whole)]:
        if now[i] != placements[i]:
            now[i] = placements[i]
            x = x.redistribute(placements=now)
    return x.redistribute(placements=now)  # type: ignore[no-any-return]


def redistribute(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """`x` with `placements`. The gradient comes back laid out as `x` is, whole where `x` is a partial sum."""
    back = tuple(Replicate() if p.is_partial() else p for p in x.placements)
    return _Redistribute.apply(x, tuple(placements), back)  # type: ignore[no-any-return]


def summed(x: DTensor) -> DTensor:
    """`x` without partial sums."""
    if not any(p.is_partial() for p in x.placements):
        return x
    return redistribute(x, [Replicate() if p.is_partial() else p for p in x.placements])


class Region(TorchFunctionMode):
    """The torch calls of a model's forward (or of one unit's recompute) on DTensors.

    Arguments:
        mesh: of all DTensors.
        compute: placements of each parameter while it is used.
        streams: keys of dropout calls.
    """

    running: ClassVar[list[Region]] = []

    def __init__(self, mesh: DeviceMesh, compute: Compute, streams: DropoutStreams | None) -> None:
        super().__init__()
        self.mesh, self.compute, self.streams = mesh, compute, streams
        self.paths: list[str] = [""]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, structure = compat.flatten((args, kwargs))
        if only_asks(func) or not any(isinstance(x, DTensor) for x in leaves):
            return func(*args, **kwargs)
        name = plain_name(func)
        self._refuse(func, name, leaves, kwargs)
        if getattr(func, "__name__", "") in HOST_READS:
            leaves = [x.full_tensor() if isinstance(x, DTensor) else x for x in leaves]
            args, kwargs = compat.unflatten(leaves, structure)
            return func(*args, **kwargs)
        leaves = [self._used(x) for x in leaves]
        args, kwargs = compat.unflatten(leaves, structure)
        if name == "dropout":
            return drop(args, kwargs, self.streams, self.paths[-1])
        if name == "scaled_dot_product_attention":
            args, kwargs = (), _whole_groups(args, kwargs)
            if kwargs.get("dropout_p"):
                return drop_attention(kwargs, self.streams, self.paths[-1])
        return self._run(func, name, args, kwargs)

    def _used(self, x: Any) -> Any:
        if isinstance(x, DTensor):
            return redistribute(x, self.compute[x]) if isinstance(x, nn.Parameter) else summed(x)
        if isinstance(x, Tensor) and x.dim():
            # Constants and buffers, equal on all ranks. Left plain they would meet DTensors in backward, which refuses.
            return DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return x

    def _run(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        if name == "linear":
            args = _pinned(*args, **kwargs)
            kwargs = {}
        dims = blocked_dims(name, args, kwargs)
        leaves, structure = compat.flatten((args, kwargs))
        kept = [_off(x, shards_blocked(x, dims)) if isinstance(x, DTensor) else x for x in leaves]
        a, k = compat.unflatten(kept, structure)
        try:
            out = func(*a, **k)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError, KeyError) as error:
            if isinstance(error.__cause__, compat.data_dependent_errors()):
                raise error.__cause__ from None  # a rehearsal without values, whereas the run will have them
            # DTensor has no rule for it on these shards; its sharding is worked out before anything is sent.
            if is_in_place(func) or not any(isinstance(x, DTensor) and _sharded(x) for x in kept):
                raise
            return self._replicated(func, kept, structure)
        made = compat.flatten(out)[0]
        if any(isinstance(x, DTensor) and any(map(compat.is_strided_shard, x.placements)) for x in made):
            return self._replicated(func, kept, structure)
        return out

    def _replicated(self, func: Callable[..., Any], leaves: list[Any], structure: Any) -> Any:
        whole = [_off(x, range(x.device_mesh.ndim)) if isinstance(x, DTensor) else x for x in leaves]
        args, kwargs = compat.unflatten(whole, structure)
        return func(*args, **kwargs)

    def _refuse(self, func: Callable[..., Any], name: str, leaves: list[Any], kwargs: Any) -> None:
        if name in RANDOM:
            raise PlanError(
                f"{name} draws from the default generator, which differs between ranks", code="random-op",
                module=self.paths[-1], legal="dropout, or random numbers drawn outside the model",
            )  # fmt: skip
        target = leaves[0] if is_in_place(func) else kwargs.get("out")
        if target is None or name == "requires_grad":
            return
        others = [x for x in leaves[1:] if isinstance(x, DTensor)]
        whole = isinstance(target, DTensor) and not isinstance(target, nn.Parameter) and target.placements
        if not whole or name not in ELEMENTWISE or any(p.is_partial() for p in whole) or not _alike(target, others):
            raise PlanError(
                f"{name} writes into a tensor that is not laid out as what it writes",
                code="in-place", module=self.paths[-1], legal="the same without writing in place",
            )  # fmt: skip


def _alike(target: DTensor, others: list[DTensor]) -> bool:
    return all(x.placements == target.placements and x.shape == target.shape for x in others)


def _sharded(x: DTensor) -> bool:
    return any(not p.is_replicate() for p in x.placements)


def _off(x: DTensor, dims: Sequence[int]) -> DTensor:
    """`x` replicated on the mesh dims `dims`."""
    if not dims or not _sharded(x):
        return x
    return redistribute(x, [Replicate() if i in dims else p for i, p in enumerate(x.placements)])


def _whole_groups(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Attention's arguments by name: q, k and v sharded alike on each mesh dim, by batch or whole groups of heads, else
    replicated there. Grouped heads are repeated here, so that the call sees as many keys as queries."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v = (given[n] for n in names[:3])
    if all(isinstance(x, DTensor) for x in (q, k, v)):
        off = []
        for i in range(q.device_mesh.ndim):
            places = {(x.placements[i], x.dim()) for x in (q, k, v)}
            heads = places == {(Shard(q.dim() - 3), q.dim())} and q.dim() >= 4
            uneven = heads and any(x.shape[-3] % q.device_mesh.size(i) for x in (q, k, v))
            if len(places) > 1 or uneven or q.placements[i] in (Shard(q.dim() - 1), Shard(q.dim() - 2)):
                off.append(i)
        q, k, v = (_off(x, off) for x in (q, k, v))
        if given.pop("enable_gqa", False) and k.shape[-3] != q.shape[-3]:
            k, v = (_repeated(x, q.shape[-3] // x.shape[-3]) for x in (k, v))
        given |= {"query": q, "key": k, "value": v}
    return given


def _pinned(input: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
    """Arguments of a linear layer, its input replicated where the weight's columns are split or where a dim between the
    first and the last is: left to itself DTensor may gather the weight, or give up a shard of the flattened rows."""
    if isinstance(input, DTensor) and isinstance(weight, DTensor):
        pairs = list(zip(input.placements, weight.placements, strict=True))
        off = [
            i for i, (p, w) in enumerate(pairs)
            if isinstance(p, Shard) and (0 < p.dim < input.dim() - 1 or w == Shard(0))
        ]  # fmt: skip
        input = _off(input, off)
    return (input, weight) if bias is None else (input, weight, bias)


def _repeated(x: DTensor, times: int) -> Tensor:
    *lead, heads, length, width = x.shape
    return x.unsqueeze(-3).expand(*lead, heads, times, length, width).reshape(*lead, heads * times, length, width)


@contextmanager
def running(region: Region) -> Iterator[None]:
    """The region's mode and DTensor settings around a forward, or a recompute inside backward; nested ones are one."""
    if Region.running and Region.running[-1] is region:
        yield
        return
    Region.running.append(region)
    compat.implicit_replication(True)
    math = [SDPBackend.MATH] if region.mesh.device_type == "cpu" else [
        SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
    ]  # fmt: skip
    try:
        with sdpa_kernel(math), region:
            yield
    finally:
        Region.running.pop()
        if not Region.running:
            compat.implicit_replication(False)


class _Leave(torch.autograd.Function):
    """The end of a region: forward nothing; backward scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.scale, None


def leave(x: DTensor, data: Sequence[bool], keep: Sequence[bool]) -> Tensor:
    """A region's output as this rank's plain tensor: on data axes it keeps its shards, on others it is whole.

    A step means the mean of the ranks' losses over the data axes, so the gradient that arrives is that of one rank's
    loss, `data ranks` times what it adds to the mean; where ranks hold the same value, their gradients add up.

    Arguments:
        data: for each mesh dim, whether it is one of data axes.
        keep: for each mesh dim, whether the plan wants the output's own shards there.
    """
    x = summed(x)
    x = _off(x, [i for i, (d, k) in enumerate(zip(data, keep, strict=True)) if not d and not k])
    if not x.requires_grad:
        return x.to_local()
    ranks = 1
    for i, is_data in enumerate(data):
        ranks *= x.device_mesh.size(i) if is_data else 1
    x = redistribute(x, x.placements)
    back = [Partial() if d and p.is_replicate() else p for d, p in zip(data, x.placements, strict=True)]
    return _Leave.apply(x.to_local(grad_placements=back), 1.0 / ranks)  # type: ignore[no-any-return]
