"""Built meshes: groups on real gloo ranks against the arithmetic, and the fake world at 16,384 ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan.errors import PlanError
from meshplan.mesh.build import abstract_groups, build_groups
from meshplan.mesh.spec import MeshSpec
from tests.counting import calls_of

DATA = ("dp_replicate", "dp_shard", "cp")


@pytest.fixture
def fake_world():
    """Start a fake process group: `fake_world(world_size, rank)`."""

    def start(world, rank=0):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _summed_ranks(axes_list, spec, sets):
    """For each axes, this rank's (axis, size, position, sum of the global ranks of its group as they really sum)."""
    built = build_groups(spec, "cpu", sets)
    out = []
    for axes in axes_list:
        group = built.group(*axes)
        total = group.all_reduce(torch.tensor([float(dist.get_rank())]))
        out.append((group.axis, group.size, group.rank, total.item()))
    return out


def test_every_group_communicates_among_the_ranks_that_the_arithmetic_says(pool):
    spec = MeshSpec.resolve({"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}, 4)
    axes_list = [("tp",), ("dp_shard", "cp"), ("dp_shard", "tp"), ("cp",), ("dp",), ("pp",)]
    ranks = pool.run(_summed_ranks, axes_list, spec, [("dp_shard", "cp"), ("dp_shard", "tp")])
    for rank, answers in enumerate(ranks):
        for axes, (_, size, position, total) in zip(axes_list, answers, strict=True):
            members = spec.group_of(rank, *axes)
            assert (size, members[position], total) == (len(members), rank, sum(members))
    assert [axis for axis, *_ in ranks[0]] == ["tp", "dp_shard", "dp_shard+tp", "cp", "dp_shard", "pp"]


def _split(spec):
    built = build_groups(spec, "cpu", [("tp",), ("dp_shard", "cp")])
    names = [built.group(*axes).axis for axes in (("tp",), ("tp_kv",), ("tp_rep",), ("tp_kv", "tp_rep"))]
    sums = [
        built.group(axis).all_reduce(torch.tensor([float(dist.get_rank())])).item()
        for axis in ("tp", "tp_kv", "tp_rep")
    ]
    return names, sums, built.mesh_of("tp").mesh.tolist(), built.mesh_of("tp_kv", "tp_rep").mesh.tolist()


def test_a_split_axis_has_its_parts_and_its_whole(pool):
    spec = MeshSpec.resolve({"tp": 4}, 4).split_axis("tp", {"tp_kv": 2, "tp_rep": 2})
    for rank, (names, sums, whole, parts) in enumerate(pool.run(_split, spec)):
        assert names == ["tp", "tp_kv", "tp_rep", "tp"]
        assert sums == [6, (2, 4)[rank % 2], (1, 5)[rank // 2]]
        assert (whole, parts) == ([0, 1, 2, 3], [[0, 1], [2, 3]])


def _build_twice(spec):
    first = build_groups(spec, "cpu", [("dp",)])
    count = len(dist.distributed_c10d._world.pg_map)
    second = build_groups(spec, "cpu", [("dp",)])
    return first.mesh is second.mesh, len(dist.distributed_c10d._world.pg_map) - count


def test_building_the_same_mesh_again_makes_no_group(pool):
    spec = MeshSpec.resolve({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, 4)
    assert pool.run(_build_twice, spec) == [(True, 0)] * 4
    # And the next process group does not get groups of the last one.
    assert pool.run(_build_twice, spec) == [(True, 0)] * 4


def _heard(specs, sets):
    try:
        build_groups(specs[dist.get_rank()], "cpu", sets[dist.get_rank()], timeout_s=20)
    except PlanError as error:
        return error.code, str(error)
    return None


def test_ranks_that_would_build_different_groups_all_raise_before_any_is_made(pool):
    by_shard, by_tp = MeshSpec((("dp_shard", 2),)), MeshSpec((("tp", 2),))
    heard = pool.run(_heard, [by_shard, by_tp], [[], []], world=2)
    assert heard[0] == heard[1]
    assert heard[0][0] == "ranks-differ"
    assert "mesh: dp_shard 2 on rank 0; tp 2 on rank 1" in heard[0][1]


def test_a_rank_with_a_wrong_size_says_so_and_the_others_hear_of_it(pool):
    good, bad = MeshSpec((("tp", 2),)), MeshSpec((("tp", 3),))
    heard = pool.run(_heard, [good, bad], [[], []], world=2)
    assert [code for code, _ in heard] == ["rank-failed", "mesh-size"]
    assert "rank 1 failed: mesh tp 3 is 3 ranks, and the process group has 2" in heard[0][1]


def test_a_world_of_16384_is_built_without_work_for_each_pair_of_ranks(fake_world):
    fake_world(16384, rank=9001)
    spec = MeshSpec.resolve({"pp": 16, "dp_replicate": 4, "dp_shard": -1, "cp": 1, "tp": 8}, 16384)
    built, calls = calls_of(lambda: build_groups(spec, "cpu", [("dp_shard", "cp"), DATA]))
    # Some 35 a rank; a group made for each rank of the world would be hundreds of millions.
    assert calls < 64 * 16384
    for axes in [("pp",), ("tp",), ("dp_shard", "cp"), DATA]:
        group, members = built.group(*axes), spec.group_of(9001, *axes)
        assert (group.size, members[group.rank]) == (len(members), 9001)
        assert dist.get_process_group_ranks(built.mesh_of(axes).get_group()) == list(members)


def test_fully_shard_meshes_are_flattened_and_share_one_root(fake_world):
    fake_world(24, rank=7)
    spec = MeshSpec.resolve({"dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}, 24)
    built = build_groups(spec, "cpu", [("dp_shard", "cp")])
    shard = built.mesh_of(("dp_shard", "cp"))
    assert shard.mesh.tolist() == list(spec.group_of(7, "dp_shard", "cp")) == [1, 3, 5, 7, 9, 11]
    hsdp = built.mesh_of("dp_replicate", ("dp_shard", "cp"))
    assert hsdp.mesh.tolist() == [[1, 3, 5, 7, 9, 11], [13, 15, 17, 19, 21, 23]]
    assert built.mesh_of("dp_replicate", ("dp_shard", "cp"), "tp").shape == (2, 6, 2)
    assert built.group("cp", "dp_shard").name == shard.get_group().group_name


def _fsdp_over_tp(spec):
    """Local shape of an 8 x 6 weight under fully_shard x tp, and its gradient gathered whole."""
    built = build_groups(spec, "cpu", [("dp_shard", "cp")])
    linear = torch.nn.Linear(6, 8, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(linear.weight)
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.data, built.mesh_of("tp"), [Shard(0)]))
    fully_shard(linear, mesh=built.mesh_of(("dp_shard", "cp")))
    x = DTensor.from_local(torch.full((1, 6), 1.0 + dist.get_rank() // 2, dtype=torch.float64), built.mesh_of("tp"))
    linear(x).sum().full_tensor().backward()
    return tuple(linear.weight.to_local().shape), linear.weight.grad.full_tensor()[:, 0].tolist()


def test_fully_shard_over_dp_shard_and_cp_composes_with_tp(pool):
    spec = MeshSpec.resolve({"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}, 4)
    # 8 rows over tp 2 and dp_shard 2; data ranks see 1 and 2, and fully_shard averages.
    assert pool.run(_fsdp_over_tp, spec) == [((2, 6), [1.5] * 8)] * 4


def test_axes_of_one_rank_have_meshes_but_nothing_to_send_on(fake_world):
    fake_world(4)
    built = build_groups(MeshSpec.resolve({"dp_replicate": 4, "dp_shard": 1}, 4), "cpu", [("dp_shard", "cp")])
    group = built.group("dp_shard", "cp")
    assert (group.axis, group.size, group.rank, group.name) == ("dp_shard+cp", 1, 0, None)
    assert built.mesh_of("dp_replicate", ("dp_shard", "cp")).shape == (4, 1)
    assert built.mesh_of("cp").shape == (1,)


def test_one_rank_in_all_is_a_mesh_too(fake_world):
    fake_world(1)
    built = build_groups(MeshSpec.resolve({}, 1), "cpu", [("dp_shard", "cp")])
    assert built.group("tp").size == 1
    assert built.mesh_of(("dp_shard", "cp")).shape == (1,)


def test_a_group_nobody_declared_is_not_made_in_passing(fake_world):
    fake_world(8)
    built = build_groups(MeshSpec.resolve({"dp_shard": 2, "cp": 2, "tp": 2}, 8), "cpu", [("dp_shard", "cp")])
    with pytest.raises(LookupError, match=r"cp\+tp was built.*there are dp_shard, cp, tp, dp_shard\+cp"):
        built.group("cp", "tp")
    with pytest.raises(LookupError):
        built.mesh_of("pp")


def test_a_spec_must_fill_its_process_group(fake_world):
    spec = MeshSpec.resolve({"tp": 3}, 3)
    with pytest.raises(PlanError) as error:
        build_groups(spec, "cpu")
    assert error.value.code == "no-process-group"
    fake_world(4)
    with pytest.raises(PlanError, match="mesh tp 3 is 3 ranks, and the process group has 4") as error:
        build_groups(spec, "cpu")
    assert error.value.code == "mesh-size"


def test_abstract_groups_have_the_numbers_of_built_ones_and_report_calls(fake_world):
    fake_world(24, rank=17)
    spec = MeshSpec.resolve({"dp_replicate": 2, "dp_shard": 3, "cp": 1, "tp": 4}, 24)
    sets = [("dp_shard", "cp"), DATA, ("tp",)]
    built, told = build_groups(spec, "cpu", sets), []
    abstract = abstract_groups(spec, 17, lambda op, group, full: told.append((op, group.axis, tuple(full.shape))))
    for axes in sets:
        real, shadow = built.group(*axes), abstract.group(*axes)
        assert (real.axis, real.size, real.rank) == (shadow.axis, shadow.size, shadow.rank)
        assert real.name is not None and shadow.name is None
    assert abstract.group("tp").all_gather(torch.ones(2, 3), 1).shape == (2, 12)
    assert told == [("all_gather", "tp", (2, 12))]
