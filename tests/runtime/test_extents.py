"""Boxes against index sets worked out by hand, for ranks of meshes larger than this machine (fake process group)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshplan.errors import PlanError
from meshplan.runtime.extents import Box, boxes_of


@pytest.fixture
def on_rank():
    """`on_rank(rank, mesh_shape, local_shape, shape, placements)`: the DTensor that `rank` of such a mesh holds."""

    def make(rank: int, mesh: tuple[int, ...], local: tuple[int, ...], shape: tuple[int, ...], *placements: Placement):
        if dist.is_initialized():
            dist.destroy_process_group()
        world = torch.Size(mesh).numel()
        dist.init_process_group("fake", rank=rank, world_size=world)
        names = ("dp", "tp")[-len(mesh) :]
        device_mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh), mesh_dim_names=names)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            torch.zeros(local), device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def row_sets(boxes: list[Box]) -> list[int]:
    return [row for box in boxes for row in range(box.offset[0], box.offset[0] + box.size[0])]


def test_fsdp_over_tp_cuts_tp_first_also_where_ranks_are_empty(on_rank):
    """7 rows on tp 2 are 4 + 3; FSDP2 cuts each on dp 3: 2, 2, 0 and 1, 1, 1. Read left to right, DTensor would give
    row 4 of dp 2 to tp 0."""
    expected = {(0, 0): [0, 1], (0, 1): [4], (1, 0): [2, 3], (1, 1): [5], (2, 0): [], (2, 1): [6]}
    for (dp, tp), rows in expected.items():
        t = on_rank(dp * 2 + tp, (3, 2), (len(rows), 5), (7, 5), _StridedShard(0, split_factor=2), Shard(0))
        assert row_sets(boxes_of("w", t)) == rows, (dp, tp)


def test_two_axes_left_to_right_and_on_different_dims(on_rank):
    t = on_rank(5, (3, 2), (1, 4), (7, 4), Shard(0), Shard(0))  # 7 on 3: 3, 3, 1; dp 2 has row 6, which tp 0 takes
    assert boxes_of("w", on_rank(4, (3, 2), (1, 4), (7, 4), Shard(0), Shard(0))) == [Box((6, 0), (1, 4), (0, 0))]
    with pytest.raises(PlanError, match=r"holds \[1, 4\] .* implies \[0, 4\]") as e:
        boxes_of("w", t)
    assert e.value.code == "shard-extent"
    t = on_rank(3, (3, 2), (3, 2), (7, 5), Shard(0), Shard(-1))  # dp 1, tp 1: rows 3 to 5, columns 3 and 4
    assert boxes_of("w", t) == [Box((3, 3), (3, 2), (0, 0))]


def test_fused_parts_give_one_box_a_part_joined_where_they_touch(on_rank):
    t = on_rank(1, (2,), (6, 3), (11, 3), Shard(0))  # parts of 5, 4, 2: rank 1 has 3-4, 7-8, 10
    with pytest.raises(PlanError, match=r"implies \[5, 3\]"):
        boxes_of("w", t, {"tp": [5, 4, 2]})
    t = on_rank(1, (2,), (5, 3), (11, 3), Shard(0))
    assert boxes_of("w", t, {"tp": [5, 4, 2]}) == [
        Box((3, 0), (2, 3), (0, 0)),
        Box((7, 0), (2, 3), (2, 0)),
        Box((10, 0), (1, 3), (4, 0)),
    ]
    assert boxes_of("w", t, {"dp": [5, 6]}) == [Box((6, 0), (5, 3), (0, 0))]
    with pytest.raises(PlanError, match="sum to 10, the dim has 11") as e:
        boxes_of("w", t, {"tp": [5, 5]})
    assert e.value.code == "bad-parts"


def test_an_interleaving_strided_shard_is_read_as_pieces(on_rank):
    t = on_rank(1, (2,), (4, 1), (8, 1), _StridedShard(0, split_factor=2))  # pieces 0-3 and 4-7, halved each
    assert row_sets(boxes_of("w", t)) == [2, 3, 6, 7]


def test_whole_empty_and_pending(on_rank):
    assert boxes_of("w", torch.zeros(2, 3)) == [Box((0, 0), (2, 3), (0, 0))]
    assert boxes_of("w", torch.tensor(1.0)) == [Box((), (), ())]
    assert boxes_of("w", on_rank(1, (2,), (4, 3), (4, 3), Replicate())) == [Box((0, 0), (4, 3), (0, 0))]
    assert boxes_of("w", on_rank(1, (2,), (0, 3), (0, 3), Shard(0))) == [Box((0, 0), (0, 3), (0, 0))]
    with pytest.raises(PlanError) as e:
        boxes_of("w", on_rank(1, (2,), (4, 3), (4, 3), Partial()))
    assert e.value.code == "partial-tensor"
