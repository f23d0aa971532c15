"""Semantic operators in the place of torch calls: settings from the compiler bound to a rank's groups.

The compiler runs the same functions over abstract groups, the run over real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.mesh.build import Groups
from meshplan.mesh.spec import hybrid_axes
from meshplan.ops import norm
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.flex import flex_call, flex_on_rank
from meshplan.ops.attention.sequence import Sequence as SequenceOrder
from meshplan.ops.cross_entropy import cross_entropy
from meshplan.ops.dropout import DropoutStreams, Runs, dropout
from meshplan.ops.dropout_attention import scaled_dot_product_attention
from meshplan.ops.embedding import embedding
from meshplan.ops.experts.block_run import Where, run_block
from meshplan.ops.experts.contract import Body
from meshplan.ops.experts.experts import dispatch_of, routed_experts
from meshplan.ops.experts.layout import TokenLayout
from meshplan.plan.placements import Shard, dealt, parts_inside
from meshplan.runtime.comm import AxisGroup, chunk_offset, chunk_sizes
from meshplan.runtime.loads import observe
from meshplan.runtime.windows import fused_body, opener

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def bind(name: str, settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    """A function `(func, args, kwargs) -> Tensor` that stands for the torch call `func(*args, **kwargs)` on this rank.

    Arguments:
        name: embedding, cross_entropy, split_norm, dropout, attention_dropout, context_attention, flex_attention, experts or
            experts_block.
        settings: the compiler's, see `Chooser.replacement`.
        groups: this rank's groups, real or abstract.
        streams: keys of the dropout calls; None while compiling, where no key matters.
    """
    return _BINDERS[name](settings, groups, streams)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    from meshplan.compiler.rules.semantic import SIGNATURES

    return {**dict(zip(SIGNATURES[func], args, strict=False)), **kwargs}


def _embedding(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    group, size = groups.group(*settings["rows"]), settings["size"]

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = _named(func, args, kwargs)
        return embedding(
            a["input"], a["weight"], group=group, vocab_size=size, padding_idx=a.get("padding_idx"),
            scale_grad_by_freq=a.get("scale_grad_by_freq", False), max_norm=a.get("max_norm"), sparse=a.get("sparse", False),
        )  # fmt: skip

    return run


def _cross_entropy(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    classes, tokens, size = settings.get("classes", ()), settings.get("tokens", ()), settings["size"]
    vocab_group = groups.group(*classes) if classes else groups.alone()
    count_groups = [groups.group(*tokens)] if tokens else []

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = _named(func, args, kwargs)
        return cross_entropy(
            a["input"], a["target"], a.get("weight"), vocab_group=vocab_group, vocab_size=size, count_groups=count_groups,
            ignore_index=a.get("ignore_index", -100), reduction=a.get("reduction", "mean"),
            label_smoothing=a.get("label_smoothing", 0.0),
        )  # fmt: skip

    return run


def _split_norm(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    group, size = groups.group(*settings["normed"]), settings["size"]

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = _named(func, args, kwargs)
        if "rms" in func.__name__:
            return norm.rms_norm(a["input"], (size,), a.get("weight"), a.get("eps"), group=group)
        return norm.layer_norm(a["input"], (size,), a.get("weight"), a.get("bias"), a.get("eps") or 1e-5, group=group)

    return run


def offsets_of(shape: Sequence[int], shards: Sequence[tuple[str, Shard]], groups: Groups) -> list[int | Runs]:
    """Where this rank's part begins on each dim, or its runs where it is not one; an axis further in splits what an outer one
    left."""
    held: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]  # (start, length) in the order of the rank's part
    outer: dict[int, list[tuple[tuple[int, ...] | None, int]]] = {}
    for axis, shard in shards:
        group, runs = groups.group(axis), held[shard.dim]
        size = sum(length for _, length in runs)
        around = outer.setdefault(shard.dim, [])
        parts = parts_inside(shard.parts, around) if shard.parts else (size,)
        if parts is None:
            raise PlanError(f"axes split dim {shard.dim} across each other's parts", code="block-outside")
        around.append((shard.parts, group.size))
        kept, start = [], 0
        for number, part in enumerate(parts):
            at = dealt(parts, number, group.size, group.rank)
            offset, length = chunk_offset(part, group.size, at), chunk_sizes(part, group.size)[at]
            kept += _within(runs, start + offset, length)
            start += part
        held[shard.dim] = kept
    return [_as_offset(runs) for runs in held]


def _within(runs: Sequence[tuple[int, int]], start: int, length: int) -> list[tuple[int, int]]:
    """Of the concatenation of `runs`, the runs that `length` elements from `start` on lie in."""
    found, at = [], 0
    for first, size in runs:
        low, high = max(start, at), min(start + length, at + size)
        if low < high:
            found.append((first + low - at, high - low))
        at += size
    return found


def _as_offset(runs: Sequence[tuple[int, int]]) -> int | Runs:
    if not runs:
        return 0
    joined = [runs[0]]
    for first, size in runs[1:]:
        before, length = joined[-1]
        if before + length == first:
            joined[-1] = (before, length + size)
        else:
            joined.append((first, size))
    return joined[0][0] if len(joined) == 1 else tuple(joined)


def _context_attention(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    shape, module = settings["global_shape"], settings["module"]
    batch, head = offsets_of(shape, settings["shards"], groups)[:2]
    group = groups.group(settings["axis"])
    outer, inner = map(groups.group, hybrid_axes(settings["axis"])) if settings["inner"] else (None, None)
    order = SequenceOrder(settings["size"], group.size, settings["order"])

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if func is flex_call:
            a = flex_on_rank(args, batch, head, order.size)
        else:
            a = _named(func, args, kwargs)
        if "sinks" in a:
            a["sink"] = a.pop("sinks")
        key = streams.key(module) if streams is not None and a.get("dropout_p") else 0
        return context_attention(
            **a, group=group, inner_group=inner, outer_group=outer, method=settings["method"], sequence=order, stream=key,
            global_shape=shape, offsets=(batch, head), equal_heads=settings["equal_heads"], transport=settings["transport"],
        )  # fmt: skip

    return run


def _flex_attention(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    batch, head = offsets_of(settings["global_shape"], settings["shards"], groups)[:2]

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = flex_on_rank(args, batch, head)
        seen, query = a.pop("sees"), a["query"]
        rows = torch.arange(query.shape[2], device=query.device)
        return F.scaled_dot_product_attention(**a, attn_mask=seen and seen((0, query.shape[1]), rows))

    return run


def _dispatcher(settings: Mapping[str, Any], groups: Groups, etp: AxisGroup | None = None) -> Callable[..., Tensor]:
    """`routed_experts` over the ranks of ep, by the way that the plan says."""
    group, experts = _over(settings, groups, "ep"), settings["experts"]
    levels = (_over(settings, groups, "nodes"), _over(settings, groups, "node"))
    window = opener(group, experts) if settings["dispatch"] == "fused" else None

    def send(tokens: Tensor, indices: Tensor, weights: Tensor, body: Body, **more: Any) -> Tensor:
        seen = partial(observe, settings["module"], experts=experts, group=group, etp=etp)
        way = dispatch_of(settings["dispatch"], group.size, indices.shape[1])
        if window is not None and group.name is None and not compat.is_fake(tokens):
            way = {"dispatch": "alltoall", "dedup": True}  # simulated ranks: the same rows and sums, and no kernels
        return routed_experts(
            tokens, indices, weights, body, experts=experts, group=group,
            levels=levels if way["dispatch"] == "twolevel" else None, payload=settings["payload"], window=window,
            observe=None if compat.is_fake(tokens) else seen, **more, **way,
        )  # fmt: skip

    return send


def _over(settings: Mapping[str, Any], groups: Groups, key: str) -> AxisGroup:
    return groups.group(*settings[key]) if settings[key] else groups.alone()


def _experts(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    group, experts, etp = _over(settings, groups, "ep"), settings["experts"], _over(settings, groups, "etp")
    held = experts // group.size if settings["packed"] else experts
    # Experts that hold parameters of their own are all there, and numbered as in the model.
    first = 0 if settings["packed"] else group.rank * (experts // group.size)
    layout = TokenLayout(
        copies=_over(settings, groups, "copies"), etp=etp, etp_copies=settings["etp_copies"], equal=settings["equal"]
    )
    send, fused = _dispatcher(settings, groups, etp), settings["dispatch"] == "fused"

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        own, tokens, indices, weights = args[:4]
        body = fused_body(own, held, first) if fused and not compat.is_fake(tokens) else own.body(held, first)
        meanwhile = None if own.early is None else own.early.meanwhile()
        out = send(tokens, indices, weights, body, layout=layout, equal=settings["equal"], meanwhile=meanwhile)
        # FSDP hooks a unit's result, which a view would lose to an operation in place.
        return out.clone() if out._is_view() else out

    return run


def _experts_block(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    ep, copies, split = (_over(settings, groups, key) for key in ("ep", "copies", "split"))
    where = Where(group=ep, copies=copies, split=split, dispatch=_dispatcher(settings, groups))

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        own, given, named = args[:3]
        return run_block(own, given, named, where)

    return run


def _dropout(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    shape, module = settings["global_shape"], settings["module"]
    offsets = offsets_of(shape, settings["shards"], groups)

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = _named(func, args, kwargs)
        key = streams.key(module) if streams is not None else 0
        return dropout(
            a["input"], a.get("p", 0.5), a.get("training", True), key=key, global_shape=shape, offsets=offsets,
            inplace=a.get("inplace", False),
        )  # fmt: skip

    return run


def _attention_dropout(settings: Mapping[str, Any], groups: Groups, streams: DropoutStreams | None) -> Run:
    shape, module = settings["global_shape"], settings["module"]
    offsets = offsets_of(shape, settings["shards"], groups)

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        key = streams.key(module) if streams is not None else 0
        return scaled_dot_product_attention(*args, **kwargs, stream=key, global_shape=shape, offsets=offsets)

    return run


_BINDERS: dict[str, Callable[[Mapping[str, Any], Groups, DropoutStreams | None], Run]] = {
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "split_norm": _split_norm,
    "dropout": _dropout,
    "attention_dropout": _attention_dropout,
    "context_attention": _context_attention,
    "flex_attention": _flex_attention,
    "experts": _experts,
    "experts_block": _experts_block,
}
