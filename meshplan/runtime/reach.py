"""Which ranks can read each other's memory: asked through the store before anything is sent, with one answer for all."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.mesh.agree import agree

_WAIT = timedelta(seconds=60)


def require(name: str, axis: str, device_type: str, *, asks: str, code: str, legal: str, unable: str = "") -> None:
    """Raise PlanError `code` on every rank of the world unless the ranks of every such group can read each other's memory:
    processes of one host, and on CUDA devices that access each other directly.

    Arguments:
        name: the registered name of this rank's process group over `axis`.
        asks: what the plan says, as in "context.transport is peer"; legal: what would be.
        unable: why this process cannot take part, whatever its device; "" if it can.
    """
    if dist.get_backend() == "fake":
        return
    store, ranks = compat.default_store(), members(name)
    base = turn(store, name, "reach")
    store.set(f"{base}/{dist.get_rank()}", f"{socket.gethostname()} {unable or reaches(device_type)}")
    keys = [f"{base}/{rank}" for rank in ranks]
    store.wait(keys, _WAIT)
    said = [store.get(key).decode().split(" ", 1) for key in keys]
    hosts = {host for host, _ in said}
    blind = [(rank, why) for rank, (_, why) in zip(ranks, said, strict=True) if why]
    error = None
    if len(hosts) > 1 or blind:
        what = f"are on {len(hosts)} hosts" if len(hosts) > 1 else f"cannot: {blind[0][1]} (rank {blind[0][0]})"
        error = PlanError(f"{asks}, and the ranks {list(ranks)} of {axis} {what}", code=code, legal=legal)
    mine = None if error is None else str(error)
    try:
        agree(store, dist.get_rank(), dist.get_world_size(), program_hash="reach", facts={}, error=mine, tag="reach")
    except PlanError as verdict:
        raise error or verdict from None


def reaches(device_type: str) -> str:
    """Why this process's device cannot read every other one of its host; "" if it can."""
    if device_type != "cuda":
        return ""
    here = torch.cuda.current_device()
    others = [d for d in range(torch.cuda.device_count()) if d != here]
    fine = not torch.version.hip and all(torch.cuda.can_device_access_peer(here, d) for d in others)
    return "" if fine else "its device does not access all others"


def members(name: str) -> tuple[int, ...]:
    """Ranks of the process group registered as `name`."""
    return tuple(dist.get_process_group_ranks(compat.process_group_of(name)))  # type: ignore[arg-type]


def turn(store: dist.Store, name: str, what: str) -> str:
    """A prefix of keys that the ranks of a group use once: each counts how often it came."""
    group = f"meshplan/peers/{what}/{'-'.join(map(str, members(name)))}"
    return f"{group}/{store.add(f'{group}/turn/{dist.get_rank()}', 1)}"
