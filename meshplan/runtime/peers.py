"""The peer rings of this process: one for each group, opened when it is first used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import compat
from meshplan.runtime.peer_ring import PeerRing
from meshplan.runtime.reach import members, turn

_ALIGNED = 4096
"""Windows are of so many bytes or a power of two more, so that messages of growing size open few."""

_rings: WeakKeyDictionary[Any, list[tuple[int, PeerRing]]] = WeakKeyDictionary()
"""By process group, (window, ring), the largest last. Smaller ones are kept, since a peer may still be reading there."""


def share(name: str, message: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`PeerRing.share` over the process group registered as `name`."""
    ring = _ring(name, message)
    for _ in range(len(members(name)) - 1):
        torch.ops.meshplan.peer_pull(message, name)
    return ring.share(message)


def collect(name: str, parts: Sequence[Tensor]) -> Tensor:
    """`PeerRing.collect` over the process group registered as `name`."""
    ring = _ring(name, parts[0])
    for _ in range(len(parts) - 1):
        torch.ops.meshplan.peer_pull(parts[0], name)
    return ring.collect(parts)


def note(op: str, rows: Tensor, name: str) -> None:
    """Let what records collectives hear of `rows` that a kernel takes over: a "peer_push" or a "peer_pull"."""
    getattr(torch.ops.meshplan, op)(rows, name)


# Operators that do nothing, called for each message like the one given that is about to go: what records collectives hears of
# them as of any other.
_library = torch.library.Library("meshplan", "DEF")
for _op in ("peer_pull", "peer_push"):
    _library.define(f"{_op}(Tensor message, str group_name) -> ()")
    _library.impl(_op, lambda message, group_name: None, "CompositeExplicitAutograd")


def _ring(name: str, message: Tensor) -> PeerRing:
    """The ring of a group, with windows for such messages. All its ranks come here alike, and open it together."""
    kept = _rings.setdefault(compat.process_group_of(name), [])
    size = message.numel() * message.element_size()
    if not kept or kept[-1][0] < size:
        window = _ALIGNED
        while window < size:
            window *= 2
        kept.append((window, _opened(name, window, message.device)))
    return kept[-1][1]


def _opened(name: str, window: int, device: torch.device) -> PeerRing:
    ranks = members(name)
    if dist.get_backend() == "fake":
        return _Nobody(ranks.index(dist.get_rank()), len(ranks))
    if device.type == "cuda":
        from meshplan.kernels.attention.peer_ring import symmetric_ring

        return symmetric_ring(compat.process_group_of(name), window, device)  # type: ignore[arg-type]
    from meshplan.runtime.shared_ring import SharedRing

    store = compat.default_store()
    return SharedRing(store, turn(store, name, "ring"), ranks.index(dist.get_rank()), len(ranks), window)


class _Nobody:
    """The ring of a fake process group, which has no other ranks: shapes without values."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def share(self, message: Tensor) -> Iterator[tuple[int, Tensor]]:
        yield self.rank, message
        for step in range(1, self.ranks):
            yield (self.rank + step) % self.ranks, torch.empty_like(message)

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[self.rank].clone()
