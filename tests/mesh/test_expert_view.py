"""The experts' view of meshes of 8, 16 and 64 ranks, against rank lists written by hand."""

from __future__ import annotations

import itertools

import pytest

from meshplan.errors import PlanError
from meshplan.mesh.expert_view import VIEW, expert_view, legal_degrees
from meshplan.mesh.spec import MeshSpec


def mesh(**axes: int) -> MeshSpec:
    return MeshSpec(tuple(axes.items()))


def test_ep_borrows_the_innermost_ranks_of_dp_shard():
    view = expert_view(mesh(dp_shard=4, tp=2), 2)
    assert view.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert view.groups("expert_dp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert view.groups("etp") == tuple((r,) for r in range(8))
    assert view.borrowed == {"dp_shard": 2} and view.on
    assert [view.coord(r, "ep") for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert str(view) == "expert_dp 4 x ep 2 x etp 1 (ep borrows dp_shard 2)"


def test_etp_takes_all_of_tp():
    view = expert_view(mesh(dp_shard=4, tp=2), 2, 2)
    assert view.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert view.groups("etp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert view.groups("expert_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_ep_goes_on_into_tp():
    view = expert_view(mesh(dp_shard=4, tp=2), 8)
    assert view.groups("ep") == (tuple(range(8)),)
    assert view.borrowed == {"dp_shard": 4, "tp": 2}
    assert view.degree("expert_dp") == 1


def test_ep_goes_on_into_cp_and_leaves_replicas_alone():
    view = expert_view(mesh(dp_replicate=2, dp_shard=2, cp=4), 4)
    assert view.borrowed == {"dp_shard": 2, "cp": 2}
    # 16 ranks, rank = 8 replicate + 4 shard + cp: the inner two of cp, on both ranks of dp_shard.
    assert view.group_of(0, "ep") == (0, 1, 4, 5)
    assert view.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15))
    assert view.groups("expert_dp") == ((0, 2, 8, 10), (1, 3, 9, 11), (4, 6, 12, 14), (5, 7, 13, 15))


def test_hsdp_and_etp_inside_tp_on_16_ranks():
    view = expert_view(mesh(dp_replicate=2, dp_shard=2, tp=4), 4, 2)
    assert view.borrowed == {"dp_shard": 2, "tp": 2}
    assert view.groups("etp") == tuple((r, r + 1) for r in range(0, 16, 2))
    assert view.groups("ep") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert view.groups("expert_dp") == tuple((r, r + 8) for r in range(8))
    assert view.gradient_divisor == 4


def test_64_ranks_with_stages():
    view = expert_view(mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2), 8)
    # rank = 32 pp + 16 replicate + 4 shard + 2 cp + tp
    assert view.borrowed == {"dp_shard": 4, "cp": 2}
    assert view.group_of(0, "ep") == (0, 2, 4, 6, 8, 10, 12, 14)
    assert view.group_of(33, "ep") == (33, 35, 37, 39, 41, 43, 45, 47)
    assert view.group_of(0, "expert_dp") == (0, 1, 16, 17)
    assert view.group_of(63, "expert_dp") == (46, 47, 62, 63)
    assert view.degree("expert_dp") == 64 // (2 * 8 * 1)
    assert view.gradient_divisor == 16


def test_half_of_dp_shard_on_64_ranks():
    view = expert_view(mesh(dp_shard=16, tp=4), 8, 4)
    assert view.group_of(5, "ep") == (1, 5, 9, 13, 17, 21, 25, 29)
    assert view.group_of(5, "etp") == (4, 5, 6, 7)
    assert view.group_of(5, "expert_dp") == (5, 37)


def test_every_fold_covers_every_rank_once_and_keeps_the_formula():
    for spec in (mesh(dp_shard=8), mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=4), mesh(dp_shard=6, cp=2, tp=2)):
        for etp in (1, 2, 4):
            if spec.degree("tp") % etp:
                continue
            for ep in legal_degrees(spec, etp):
                view = expert_view(spec, ep, etp)
                assert view.degree("expert_dp") == spec.world_size // (etp * spec.degree("pp") * ep)
                assert (view.degree("ep"), view.degree("etp")) == (ep, etp)
                for name in VIEW:
                    assert sorted(itertools.chain(*view.groups(name))) == list(range(spec.world_size))
                place = {(*tuple(view.coord(r, n) for n in VIEW), spec.coord(r, "pp")) for r in range(spec.world_size)}
                assert len(place) == spec.world_size


def test_no_experts_view_is_off():
    view = expert_view(mesh(dp_shard=4), 1)
    assert not view.on and view.borrowed == {} and view.groups("expert_dp") == ((0, 1, 2, 3),)
    assert expert_view(mesh(tp=2), 1, 2).on


@pytest.mark.parametrize(
    "spec, ep, etp, legal",
    [
        (mesh(dp_shard=4, tp=2), 6, 1, "ep: 1, 2, 4, 8"),
        (mesh(dp_shard=6, cp=2), 4, 1, "ep: 1, 2, 3, 6, 12"),
        (mesh(dp_shard=4, tp=2), 8, 2, "ep: 1, 2, 4"),
        (mesh(dp_replicate=4), 4, 1, "ep: 1"),
        (mesh(dp_shard=4, tp=2), 2, 4, "etp: 1, 2"),
        (mesh(dp_shard=4), 0, 1, "ep: 1, 2, 4"),
    ],
)
def test_folds_that_cannot_be_are_refused_with_those_that_can(spec, ep, etp, legal):
    with pytest.raises(PlanError) as refusal:
        expert_view(spec, ep, etp)
    assert refusal.value.code == "expert-fold" and refusal.value.legal == legal


@pytest.mark.parametrize(
    "spec, ep, etp, inner, nodes, node",
    [
        # ep is all of dp_shard: its inner half is a node.
        (mesh(dp_shard=4), 4, 1, 2, ((0, 2), (1, 3)), ((0, 1), (2, 3))),
        # Half of dp_shard is ep, of which half is a node: three parts of one axis.
        (mesh(dp_shard=8), 4, 1, 2, ((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 1), (2, 3), (4, 5), (6, 7))),
        # tp is inside, and with a half of what ep has of dp_shard a node.
        (mesh(dp_shard=4, tp=2), 8, 1, 4, ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))),
        (mesh(dp_shard=2, tp=4), 4, 2, 2, ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 2), (1, 3), (4, 6), (5, 7))),
        (mesh(dp_shard=2, tp=2), 4, 1, 1, ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_of_ep_on_one_node_are_consecutive_ones_of_its_group(spec, ep, etp, inner, nodes, node):
    view = expert_view(spec, ep, etp, inner)
    outer, near = view.levels
    assert view.spec.groups(*outer) == nodes and view.spec.groups(*near) == node
    for rank in range(spec.world_size):
        group = view.group_of(rank, "ep")
        assert group == expert_view(spec, ep, etp).group_of(rank, "ep")
        at = group.index(rank)
        assert view.spec.group_of(rank, *near) == group[at - at % inner : at - at % inner + inner]
        assert view.spec.coord(rank, *outer) * inner + view.spec.coord(rank, *near) == view.coord(rank, "ep")


@pytest.mark.parametrize(
    "spec, ep, inner, legal",
    [
        (mesh(dp_shard=4), 4, 3, "inner: 1, 2, 4"),
        (mesh(dp_shard=4), 2, 4, "inner: 1, 2"),
        (mesh(dp_shard=2, tp=3), 6, 2, "inner: 1, 3, 6"),
    ],
)
def test_nodes_that_cut_ep_elsewhere_are_refused(spec, ep, inner, legal):
    with pytest.raises(PlanError) as refusal:
        expert_view(spec, ep, 1, inner)
    assert refusal.value.code == "expert-fold" and refusal.value.legal == legal


def test_axes_that_are_cut_already():
    spec = mesh(dp_shard=4, tp=4).split_axis("tp", {"tp_kv": 2, "tp_rep": 2})
    assert expert_view(spec, 4).group_of(0, "expert_dp") == (0, 1, 2, 3)
    assert expert_view(spec, 2, 4).group_of(0, "etp") == (0, 1, 2, 3)
    with pytest.raises(PlanError) as refusal:
        expert_view(spec, 2, 2)
    assert refusal.value.code == "expert-fold"
