"""The peer rings of this process: which groups can have one, and one for each group, opened when it is first used."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.mesh.agree import agree
from meshplan.runtime.peer_ring import PeerRing

_WAIT = timedelta(seconds=60)
_ALIGNED = 4096
"""Windows are of so many bytes or a power of two more, so that messages of growing size open few."""

_rings: WeakKeyDictionary[Any, list[tuple[int, PeerRing]]] = WeakKeyDictionary()
"""By process group, (window, ring), the largest last. Smaller ones are kept, since a peer may still be reading there."""


def require(name: str, axis: str, device_type: str) -> None:
    """Raise PlanError `peers-out-of-reach` on every rank of the world unless the ranks of every such group can read each
    other's memory: processes of one host, and on CUDA devices that access each other directly.

    Arguments:
        name: the registered name of this rank's process group over `axis`.
    """
    if dist.get_backend() == "fake":
        return
    store, members = compat.default_store(), _members(name)
    base = _base(store, name, "reach")
    store.set(f"{base}/{dist.get_rank()}", f"{socket.gethostname()} {_reaches(device_type)}")
    keys = [f"{base}/{rank}" for rank in members]
    store.wait(keys, _WAIT)
    said = [store.get(key).decode().rsplit(" ", 1) for key in keys]
    hosts = {host for host, _ in said}
    blind = [rank for rank, (_, able) in zip(members, said, strict=True) if able != "True"]
    error = None
    if len(hosts) > 1 or blind:
        why = (
            f"are on {len(hosts)} hosts" if len(hosts) > 1 else f"are not all within reach of rank {blind[0]}'s device"
        )
        error = PlanError(
            f"context.transport is peer, and the ranks {list(members)} of {axis} {why}",
            code="peers-out-of-reach",
            legal="transport: send, or cp inside one node of GPUs that NVLink connects",
        )
    mine = None if error is None else str(error)
    try:
        agree(store, dist.get_rank(), dist.get_world_size(), program_hash="peers", facts={}, error=mine, tag="peers")
    except PlanError as verdict:
        raise error or verdict from None


def share(name: str, message: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`PeerRing.share` over the process group registered as `name`."""
    ring = _ring(name, message)
    for _ in range(len(_members(name)) - 1):
        torch.ops.meshplan.peer_pull(message, name)
    return ring.share(message)


def collect(name: str, parts: Sequence[Tensor]) -> Tensor:
    """`PeerRing.collect` over the process group registered as `name`."""
    ring = _ring(name, parts[0])
    for _ in range(len(parts) - 1):
        torch.ops.meshplan.peer_pull(parts[0], name)
    return ring.collect(parts)


# An operator that does nothing, called for each message like the one given that is about to be pulled: what records
# collectives hears of it as of any other.
_library = torch.library.Library("meshplan", "DEF")
_library.define("peer_pull(Tensor message, str group_name) -> ()")
_library.impl("peer_pull", lambda message, group_name: None, "CompositeExplicitAutograd")


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
    members = _members(name)
    if dist.get_backend() == "fake":
        return _Nobody(members.index(dist.get_rank()), len(members))
    if device.type == "cuda":
        from meshplan.kernels.attention.peer_ring import symmetric_ring

        return symmetric_ring(compat.process_group_of(name), window, device)  # type: ignore[arg-type]
    from meshplan.runtime.shared_ring import SharedRing

    store = compat.default_store()
    return SharedRing(store, _base(store, name, "ring"), members.index(dist.get_rank()), len(members), window)


def _base(store: dist.Store, name: str, what: str) -> str:
    """A prefix of keys that the ranks of a group use once: each counts how often it came."""
    group = f"meshplan/peers/{what}/{'-'.join(map(str, _members(name)))}"
    return f"{group}/{store.add(f'{group}/turn/{dist.get_rank()}', 1)}"


def _members(name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(compat.process_group_of(name)))  # type: ignore[arg-type]


def _reaches(device_type: str) -> bool:
    """Whether this process's device can read every other one of its host."""
    if device_type != "cuda":
        return True
    here = torch.cuda.current_device()
    others = [d for d in range(torch.cuda.device_count()) if d != here]
    return not torch.version.hip and all(torch.cuda.can_device_access_peer(here, d) for d in others)


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
