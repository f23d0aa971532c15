"""Pure comparison of numbers, replicas and collectives: values in, the first thing that is wrong out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.recorder import Collective

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Largest relative error that passes, by dtype: some 10^6 roundings in float64, 100 in float32, and about 6 and 5 of
the half precisions, in which sums of another order differ visibly."""

FLOOR = 1e-6
"""Errors are relative to a tensor's largest value, but not to less than this share of the largest of all tensors: a
gradient that is truly zero (a key's bias under softmax) is rounding noise on both sides."""
FLOORS = {torch.float32: 1e-2, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""The same for less precise dtypes: with the tolerance it leaves a rounding or so of the largest tensor."""


@dataclass(frozen=True)
class Worst:
    """The largest relative error and the name it belongs to (None where nothing was compared)."""

    error: float
    name: str | None


def distance(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference; infinite for other shapes, or where one is NaN and the other is not."""
    if got.shape != want.shape:
        return math.inf
    if got.numel() == 0:
        return 0.0
    apart = (got - want).abs()
    apart = apart.masked_fill(got == want, 0.0)  # equal infinities
    apart = apart.masked_fill(got.isnan() & want.isnan(), 0.0)
    return apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def worst(distances: Mapping[str, float], sizes: Mapping[str, float], share: float = FLOOR) -> Worst:
    """The largest of `distances`, each relative to the larger of its tensor's size and `share` x the largest size.

    A name without a size is infinitely wrong: one device has no such tensor.
    """
    floor = share * max((s for s in sizes.values() if math.isfinite(s)), default=0.0)
    found = Worst(0.0, None)
    for name, apart in distances.items():
        scale = max(sizes[name], floor) if name in sizes else 0.0
        error = math.inf if name not in sizes or math.isnan(apart) else _ratio(apart, scale)
        if found.name is None or error > found.error:
            found = Worst(error, name)
    return found


def worst_loss(want: Sequence[float], got: Mapping[int, Sequence[float | None]]) -> Worst:
    """The largest relative error of a step's loss, named by the step.

    Arguments:
        want: one device's loss by step.
        got: each rank's by step; None where it has none. The mean over the ranks that have one is compared. (Ranks
            beside each other on tp hold equal losses, so this is the mean over data ranks.)
    """
    found = Worst(0.0, None)
    for step, value in enumerate(want):
        losses = [losses[step] for losses in got.values()]
        present = [x for x in losses if x is not None]
        if not present:
            return Worst(math.inf, f"step {step}: no rank returned a loss")
        mean = math.fsum(present) / len(present)
        both_nan = math.isnan(mean) and math.isnan(value)
        error = 0.0 if both_nan else _ratio(abs(mean - value), abs(value))
        if math.isnan(error):
            error = math.inf
        if found.name is None or error > found.error:
            found = Worst(error, f"step {step}: {mean:.9g}, one device {value:.9g}")
    return found


def first_unequal(hashes: Mapping[int, Mapping[tuple[str, str], str]]) -> str | None:
    """The first thing that two ranks hold in common and that differs, as text; None if all copies are equal.

    Arguments:
        hashes: by rank, of each (name, which part of it).
    """
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for rank in sorted(hashes):
        for key, value in hashes[rank].items():
            other, first = seen.setdefault(key, (rank, value))
            if value != first:
                name, part = key
                return f"{name}{f' ({part})' if part else ''} differs between ranks {other} and {rank}"
    return None


def missing_names(want: Iterable[str], got: Iterable[Iterable[str]]) -> list[str]:
    """Names that one device has and no rank, then those that a rank has and one device has not, sorted."""
    have = {name for names in got for name in names}
    return sorted(set(want) - have) + sorted(have - set(want))


def first_difference(
    predicted: Sequence[Mapping[str, Any]], recorded: Sequence[Collective], spec: MeshSpec, rank: int
) -> str | None:
    """Where the collectives of one step part from the comm graph's, as text; None if they agree one by one.

    Arguments:
        predicted: dicts `{phase, op, axis, ranks_per_group, count, dtype, elements, module, tensor, ...}` in program
            order; `count` ones in a row; where `routed`, data decides on `elements`, and any number matches.
        recorded: what `rank` issued.
        spec: the mesh; the ranks of an axis it knows (`tp`, `dp_shard+cp`) are compared, of others only their number.
    """
    expected = [entry for entry in predicted for _ in range(_count(entry))]
    for i, (want, got) in enumerate(zip(expected, recorded, strict=False)):
        wrong = _mismatch(want, got, spec, rank)
        if wrong:
            return (
                f"rank {rank}, collective {i + 1}: {', '.join(wrong)} differ{'s' * (len(wrong) == 1)}; "
                f"recorded {_seen(got)}, predicted {_foreseen(want)}"
            )
    if len(expected) > len(recorded):
        return f"rank {rank}: {len(recorded)} recorded, then missing {_foreseen(expected[len(recorded)])}"
    if len(recorded) > len(expected):
        return f"rank {rank}: {len(expected)} predicted, then unforeseen {_seen(recorded[len(expected)])}"
    return None


def _mismatch(want: Mapping[str, Any], got: Collective, spec: MeshSpec, rank: int) -> list[str]:
    wrong = [key for key in ("phase", "op", "dtype") if want[key] != getattr(got, key)]
    if not want.get("routed") and want["elements"] != got.elements:
        wrong.append("elements")
    axes = str(want["axis"]).split("+")
    known = all(spec.leaves(axis) for axis in axes)
    if want["ranks_per_group"] != len(got.ranks):
        wrong.append("group size")
    elif known and got.ranks != spec.group_of(rank, *axes):
        wrong.append("group")
    return wrong


def _count(entry: Mapping[str, Any]) -> int:
    count = entry.get("count", 1)
    return count if isinstance(count, int) else 1


def _seen(c: Collective) -> str:
    return f"{c.phase} {c.op} of {c.elements} {c.dtype} over ranks {list(c.ranks)}"


def _foreseen(entry: Mapping[str, Any]) -> str:
    whose = " ".join(str(entry[key]) for key in ("module", "tensor") if entry.get(key))
    elements = "routed" if entry.get("routed") else entry["elements"]
    text = (
        f"{entry['phase']} {entry['op']} of {elements} {entry['dtype']} over {entry['axis']} {entry['ranks_per_group']}"
    )
    return f"{text} ({whose})" if whose else text


def _ratio(apart: float, scale: float) -> float:
    if apart == 0.0:
        return 0.0
    return apart / scale if scale > 0.0 else math.inf
