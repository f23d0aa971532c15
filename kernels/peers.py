"""Memory of one node's ranks, mapped into each of them: the CUDA backend of torch's symmetric memory, no NVSHMEM."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Mapped(NamedTuple):
    """A region of each rank.

    Attributes:
        local: uint8, this rank's; zero at first. pointers: addresses of all ranks' regions as this rank sees them.
        keep: what has to live as long as these.
    """

    local: Tensor
    pointers: list[int]
    keep: Any


def reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of `group` are on one node, and each device reads every other's memory. Every rank calls it; all get the
    same answer."""
    places: list[Any] = [None] * group.size()
    reach = device.type == "cuda" and not torch.version.hip
    others = [d for d in range(torch.cuda.device_count()) if d != device.index]
    peers = [torch.cuda.can_device_access_peer(device, d) for d in others] if reach else []
    dist.all_gather_object(places, (socket.gethostname(), reach and all(peers)), group)
    return len({host for host, _ in places}) == 1 and all(reachable for _, reachable in places)


def map_regions(group: dist.ProcessGroup, size: int, device: torch.device) -> Mapped:
    """A region of `size` bytes of each rank of `group`, which reach each other. Every rank calls it, with the same `size`."""
    from torch.distributed import _symmetric_memory as symmetric

    symmetric.set_backend("CUDA")
    local = symmetric.empty(size, dtype=torch.uint8, device=device)
    local.zero_()
    handle = symmetric.rendezvous(local, group)
    handle.barrier()
    return Mapped(local, list(handle.buffer_ptrs), handle)
