"""Each rank on a device of its own, in the world it was launched in: checked before any communicator is made."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import torch
from torch.distributed import Store

from meshplan.errors import PlanError


def device_id(device_type: str) -> str | None:
    """What tells this process' current device from every other in the cluster; None where sharing it is legal (CPU).

    The device's UUID, which holds across containers that share a host name; host and index on a build without UUIDs.
    """
    if device_type != "cuda":
        return None
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(uuid) if uuid is not None else f"{socket.gethostname()}/cuda:{index}"


def claim_device(store: Store, rank: int, device: str | None) -> None:
    """Claim `device` (of `device_id`) for `rank` in the store. Raises PlanError `device-shared` if another rank has it.

    One store operation. Only the later of two claimants sees the clash: its error reaches the others through `agree`.
    Claiming one's own device again is harmless.
    """
    if device is None:
        return
    holder = store.compare_set(f"meshplan/device/{device}", "", str(rank)).decode()
    if holder != str(rank):
        raise PlanError(
            f"ranks {holder} and {rank} are on the same device, {device}",
            code="device-shared",
            legal="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything touches CUDA",
        )


def check_launch(world_size: int, environ: Mapping[str, str] | None = None) -> None:
    """Raise PlanError `world-size` if the launcher started another number of ranks than the process group has.

    Arguments:
        world_size: ranks in the default process group.
        environ: the environment; `os.environ` if None. Without `WORLD_SIZE` there is no launcher to differ from.
    """
    said = (os.environ if environ is None else environ).get("WORLD_SIZE", "")
    if said.isdigit() and int(said) != world_size:
        raise PlanError(
            f"the launcher started {said} ranks (WORLD_SIZE), and the default process group has {world_size}",
            code="world-size",
            legal="init_process_group without world_size=, which reads the launcher's",
        )
