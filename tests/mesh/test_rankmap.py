"""The rank map as data and as a bounded table."""

import logging

import pytest

from meshplan.mesh.rankmap import log_rank_map, rank_map, to_text
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import Topology

BIG = MeshSpec.resolve({"pp": 16, "dp_replicate": 4, "dp_shard": 8, "cp": 4, "tp": 8}, 16384)


def test_data_holds_every_group_of_a_small_world():
    spec = MeshSpec.resolve({"dp_shard": 3, "cp": 2, "tp": 5}, 30)
    said = rank_map(spec).to_dict()
    assert (said["world_size"], said["nodes"], said["node_size"]) == (30, 4, 8)
    assert [axis["axes"] for axis in said["axes"]] == [["tp"], ["cp"], ["dp_shard"], ["dp_shard", "cp"]]
    for axis in said["axes"]:
        assert sorted(rank for group in axis["groups"] for rank in group) == list(range(30))
        assert axis["groups"][0] == axis["first_group"]
        assert len(axis["groups"]) == axis["group_count"]


def test_data_of_a_big_world_gives_the_pattern_instead():
    pp = next(axis for axis in rank_map(BIG).to_dict()["axes"] if axis["axes"] == ["pp"])
    assert pp["groups"] is None
    assert pp["first_group"] == list(range(0, 16384, 1024))
    assert pp["group_count"] == 1024


@pytest.mark.parametrize("spec", [BIG, MeshSpec.resolve({"dp_shard": 63, "tp": 1}, 63)])
def test_the_table_fits_100_columns_and_a_page(spec):
    lines = to_text(rank_map(spec)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 40


def test_the_table_writes_first_groups_in_rank_order():
    # The fourth group of dp_shard in a mesh of 4 x 4 x 8 begins at rank 3, the ninth on the next replica.
    text = to_text(rank_map(MeshSpec.resolve({"dp_replicate": 4, "dp_shard": 4, "tp": 8}, 128)))
    assert "[0,8,16,24]  [1,9,17,25]  [2,10,18,26]" in text.replace("\n", " ")
    text = to_text(rank_map(MeshSpec.resolve({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 8)))
    assert "[0,2]  [1,3]  [4,6]  [5,7]" in text


def test_a_node_shows_the_coordinates_it_holds():
    lines = to_text(rank_map(MeshSpec.resolve({"pp": 2, "dp_shard": 3, "tp": 2}, 12))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("node"))
    # Ranks 8 to 11 are stage 1, data ranks 1 and 2.
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["0", "0-7", "0,1", "0-2", "0,1"],
        ["1", "8-11", "1", "1,2", "0,1"],
    ]


def test_one_rank_has_no_groups_to_show():
    assert to_text(rank_map(MeshSpec.resolve({}, 1))) == "no axes   1 rank, 1 node of 8"


def test_rank_0_logs_the_table_once_and_warns_at_warning_level(caplog):
    spec = MeshSpec.resolve({"tp": 4}, 4)
    with caplog.at_level(logging.INFO, logger="meshplan"):
        log_rank_map(spec, rank=1, topology=Topology(node_size=2))
        assert caplog.records == []
        log_rank_map(spec, rank=0, topology=Topology(node_size=2))
    table, warning = caplog.records
    assert "[0-3]" in table.getMessage() and "warning" not in table.getMessage()
    assert warning.levelno == logging.WARNING and "tp-across-nodes" in warning.getMessage()
