"""Claims on devices through a store, and the launcher's world against the process group's."""

import pytest
import torch.distributed as dist

from meshplan.errors import PlanError
from meshplan.mesh.binding import check_launch, claim_device, device_id


def test_two_ranks_on_one_device_are_named():
    store = dist.HashStore()
    claim_device(store, 0, "GPU-a")
    claim_device(store, 1, "GPU-b")
    with pytest.raises(PlanError, match="ranks 1 and 3 are on the same device, GPU-b") as error:
        claim_device(store, 3, "GPU-b")
    assert error.value.code == "device-shared"


def test_a_rank_may_claim_its_device_again():
    store = dist.HashStore()
    for _ in range(2):
        claim_device(store, 2, "GPU-a")
    with pytest.raises(PlanError):
        claim_device(store, 0, "GPU-a")


def test_ranks_share_a_cpu():
    assert device_id("cpu") is None
    store = dist.HashStore()
    claim_device(store, 0, None)
    claim_device(store, 1, None)


def test_the_launchers_world_must_be_the_process_groups():
    with pytest.raises(PlanError, match=r"started 8 ranks .* has 4") as error:
        check_launch(4, {"WORLD_SIZE": "8"})
    assert error.value.code == "world-size"
    check_launch(4, {"WORLD_SIZE": "4"})
    check_launch(4, {})
