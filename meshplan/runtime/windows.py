"""The windows of this process for fused experts: one for each group of ranks and number of experts, opened when first used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.ops.experts.call import Routed
from meshplan.ops.experts.contract import Body, Routing
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.reach import require, turn
from meshplan.runtime.shared_memory import Meeting, map_files

LEGAL = "dispatch: auto, alltoall, allgather or twolevel; or ep inside one node of GPUs that reach each other's memory"

_windows: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""By process group, its windows. Smaller ones are kept, since a peer may still be reading there."""


def require_windows(group: AxisGroup, device_type: str) -> None:
    """Raise PlanError `experts-fused` on every rank of the world unless the ranks of every such group can have one. Ranks on
    CPUs share memory of their host, and kernels run in Triton's interpreter, if they were started for it."""
    if group.name is None:
        return
    runs = device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    require(
        group.name, group.axis, device_type, asks="experts.dispatch is fused", code="experts-fused", legal=LEGAL,
        unable="" if runs else "kernels need a GPU, or TRITON_INTERPRET=1 (slow) in the environment",
    )  # fmt: skip


def opener(group: AxisGroup, experts: int) -> Callable[[Routing], Any]:
    """A function that gives the window of `group` for an exchange, the same one from its second call on: larger exchanges than
    the first are then refused by all ranks together (`experts-overflow`). All ranks call it alike."""
    held: list[Any] = []

    def window(x: Routing) -> Any:
        if group.name is None:
            raise PlanError(
                f"fused experts need processes as ranks of {group.axis}", code="experts-fused", legal=LEGAL
            )
        if not held:
            held.append(_opened(group.name, group, experts, x))
        return held[0]

    return window


def fused_body(own: Routed, held: int, first: int) -> Body:
    """The experts of a rank: as an MLP whose matmuls begin on rows as they arrive, where they are one; else their own code."""
    names = own.mlp
    if names is None:
        return own.body(held, first)
    from meshplan.kernels.experts.fused import Mlp
    from meshplan.kernels.experts.grouped import Packed
    from meshplan.kernels.experts.launch import Pair

    return Mlp(Packed(*names.of(own.module), Pair(names.interleaved, names.clamped), names.turned))


def _opened(name: str, group: AxisGroup, experts: int, x: Routing) -> Any:
    from meshplan.kernels.experts.window import Sizes, Window, open_window

    (tokens, width), k, device = x.tokens.shape, x.indices.shape[1], x.tokens.device
    store = compat.default_store()
    meeting = Meeting(store, turn(store, name, "window"), group.rank, "a window for experts")
    # Ranks may have unequal numbers of tokens; the rest they have alike.
    meeting.say(f"tokens/{group.rank}", str(tokens))
    most = max(int(meeting.read(f"tokens/{r}")) for r in range(group.size))
    sizes = Sizes(
        ranks=group.size, experts=experts, tokens=most, k=k, row_bytes=width * x.tokens.element_size(),
        weight_bytes=8 if x.tokens.dtype == torch.float64 else 4,
    )  # fmt: skip
    process_group = compat.process_group_of(name)
    kept = _windows.setdefault(process_group, [])
    for window in kept:
        if _holds(window.sizes, sizes):
            return window
    for other in (w.sizes for w in kept if w.sizes.experts == experts):
        larger = {key: max(getattr(sizes, key), getattr(other, key)) for key in _GROWING}
        sizes = replace(sizes, **larger)
    if device.type == "cuda":
        made = open_window(process_group, sizes, device)  # type: ignore[arg-type]
    else:
        regions = map_files(meeting, group.size, sizes.region)
        made = Window(sizes, {group.rank: regions[group.rank]}, [r.data_ptr() for r in regions], keep=regions)
    made.tell = group.through_memory
    kept.append(made)
    return made


_GROWING = ("tokens", "k", "row_bytes", "weight_bytes")


def _holds(have: Any, need: Any) -> bool:
    return have.experts == need.experts and all(getattr(have, key) >= getattr(need, key) for key in _GROWING)
