"""Mesh arithmetic against rank tables worked out by hand and against brute force."""

import pytest

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from tests.counting import calls_of

CUBE = MeshSpec.resolve({"pp": 4, "dp_shard": 2, "tp": 2}, 16)


def brute_groups(spec, axes):
    """Ranks that agree on every other axis, found by comparing all coordinates."""
    found = {}
    for rank in range(spec.world_size):
        key = tuple(at for name, at in spec.coords(rank).items() if name not in axes)
        found.setdefault(key, []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in found.values()))


def test_rank_0_of_the_documented_mesh_is_in_these_groups():
    assert CUBE.group_of(0, "tp") == (0, 1)
    assert CUBE.group_of(0, "dp") == (0, 2)
    assert CUBE.group_of(0, "pp") == (0, 4, 8, 12)


def test_all_groups_of_an_axis_cover_the_world_once():
    assert CUBE.groups("tp") == tuple((r, r + 1) for r in range(0, 16, 2))
    assert CUBE.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert CUBE.groups("pp") == tuple((r, r + 4, r + 8, r + 12) for r in range(4))


@pytest.mark.parametrize("axes", [("dp_shard", "tp"), ("dp_replicate", "cp"), ("cp",), ("dp_replicate", "dp_shard")])
def test_groups_of_uneven_degrees_equal_brute_force(axes):
    spec = MeshSpec.resolve({"dp_replicate": 3, "cp": 2, "dp_shard": 5, "tp": 4}, 120)
    assert spec.groups(*axes) == brute_groups(spec, axes)
    assert all(spec.group_of(r, *axes)[spec.coord(r, *axes)] == r for r in range(120))


def test_flattened_order_is_mesh_order_however_axes_are_named():
    assert CUBE.group_of(7, "tp", "pp") == CUBE.group_of(7, "pp", "tp") == (2, 3, 6, 7, 10, 11, 14, 15)


def test_roles_go_by_name_when_the_order_is_swapped():
    swapped = MeshSpec.resolve({"dp_shard": 4, "dp_replicate": 2}, 8)
    assert swapped.degree("dp_shard") == 4
    assert swapped.group_of(3, "dp_shard") == (1, 3, 5, 7)


def test_coords_and_rank_of_are_inverse():
    assert CUBE.coords(11) == {"pp": 2, "dp_shard": 1, "tp": 1}
    assert CUBE.rank_of({"pp": 2, "tp": 1}) == 9
    assert [CUBE.rank_of(CUBE.coords(r)) for r in range(16)] == list(range(16))


def test_one_degree_may_be_left_open():
    assert MeshSpec.resolve({"dp_shard": -1, "tp": 4}, 24).axes == (("dp_shard", 6), ("tp", 4))


def test_missing_axes_have_degree_1_and_groups_of_one():
    spec = MeshSpec.resolve({"tp": 2}, 2)
    assert (spec.degree("cp"), spec.degree("dp"), spec.group_of(1, "dp_shard", "cp")) == (1, 1, (1,))


def test_dp_is_replicate_times_shard():
    spec = MeshSpec.resolve({"dp_replicate": 3, "cp": 2, "dp_shard": 2}, 12)
    assert spec.degree("dp") == 6
    assert spec.group_of(2, "dp") == (2, 3, 6, 7, 10, 11)


@pytest.mark.parametrize(
    ("mesh", "world", "code", "words"),
    [
        ({"dp_shard": 4}, 6, "mesh-size", ["4 ranks", "there are 6", "dp_shard: 6", "a launch with 4 ranks"]),
        ({"dp_replicate": -1, "dp_shard": 4}, 6, "mesh-size", ["multiple of 4", "are 6", "4 or 8"]),
        ({"dp_shard": 3, "tp": 4}, 8, "mesh-size", ["12 ranks", "are 8", "dp_shard: 2", "a launch with 12"]),
        ({"dp_shard": -1, "cp": -1}, 8, "mesh-size", ["dp_shard and cp"]),
        ({}, 2, "mesh-size", ["dp_shard: 2"]),
        ({"dp_sharded": 2}, 2, "unknown-axis", ["did you mean dp_shard?"]),
        ({"dp": 2}, 2, "unknown-axis", ["'dp'"]),
        ({"tp": 0}, 1, "bad-degree", ["tp has degree 0"]),
        ({"tp": True}, 1, "bad-degree", ["True"]),
    ],
)
def test_a_mesh_that_does_not_fill_its_world_is_refused_with_numbers_and_a_fix(mesh, world, code, words):
    with pytest.raises(PlanError) as error:
        MeshSpec.resolve(mesh, world)
    assert error.value.code == code
    assert [word for word in words if word not in str(error.value)] == []


def test_a_split_axis_still_answers_by_its_own_name():
    spec = MeshSpec.resolve({"dp_shard": 3, "tp": 4}, 12).split_axis("tp", {"tp_kv": 2, "tp_rep": 2})
    assert spec.names == ("dp_shard", "tp_kv", "tp_rep")
    assert spec.parent("tp_kv") == "tp" and spec.parent("dp_shard") == "dp_shard"
    assert spec.degree("tp") == 4
    assert spec.group_of(6, "tp") == (4, 5, 6, 7)
    assert spec.group_of(6, "tp_kv") == (4, 6)
    assert spec.group_of(6, "tp_rep") == (6, 7)
    assert spec.coord(6, "tp") == 2


def test_a_part_of_a_split_axis_may_be_split_again():
    spec = MeshSpec.resolve({"dp_replicate": 2, "dp_shard": 8}, 16)
    spec = spec.split_axis("dp_shard", {"dp_shard_out": 2, "dp_shard_in": 4})
    spec = spec.split_axis("dp_shard_in", {"dp_shard_in_a": 2, "dp_shard_in_b": 2})
    assert spec.leaves("dp_shard_in") == ("dp_shard_in_a", "dp_shard_in_b")
    assert spec.degree("dp_shard") == 8 and spec.degree("dp") == 16
    assert spec.group_of(5, "dp_shard_in") == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("axis", "parts", "code"),
    [
        ("tp", {"tp_kv": 3, "tp_rep": 2}, "mesh-size"),
        ("tp", {"kv": 2, "rep": 2}, "unknown-axis"),
        ("tp", {}, "unknown-axis"),
        ("cp", {"cp_a": 1}, "unknown-axis"),
    ],
)
def test_a_wrong_split_is_refused(axis, parts, code):
    with pytest.raises(PlanError) as error:
        MeshSpec.resolve({"tp": 4}, 4).split_axis(axis, parts)
    assert error.value.code == code


@pytest.mark.parametrize("bad", [lambda: CUBE.coords(16), lambda: CUBE.coords(-1), lambda: CUBE.rank_of({"tp": 2})])
def test_ranks_and_coordinates_outside_the_mesh_are_refused(bad):
    with pytest.raises(PlanError) as error:
        bad()
    assert error.value.code == "bad-rank"


def test_one_ranks_group_costs_the_group_and_not_the_world():
    spec = MeshSpec.resolve({"pp": 2**20, "dp_shard": 2**20, "tp": 8}, 2**43)
    group, calls = calls_of(lambda: spec.group_of(2**42 + 11, "tp"))
    assert group == tuple(range(2**42 + 8, 2**42 + 16))
    assert calls < 1000
