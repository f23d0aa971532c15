"""Links against hand-drawn nodes, and against looking at every group of the world."""

import pytest

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import Topology, link_use, shown_axes, tp_layer_factor, warnings


def spec_of(world, **mesh):
    return MeshSpec.resolve(mesh, world)


def test_tp_inside_a_node_and_pp_across():
    spec = spec_of(16, pp=4, dp_shard=2, tp=2)
    tp, pp = link_use(spec, Topology(), "tp"), link_use(spec, Topology(), "pp")
    assert (tp.link, tp.inside, tp.across, tp.nodes) == ("NVLink", 1, 0, 1)
    # Ring 0, 4 | 8, 12 on nodes of 8: 4 -> 8 and 12 -> 0 cross.
    assert (pp.link, pp.inside, pp.across, pp.nodes) == ("network", 2, 2, 2)


def test_a_rank_alone_uses_no_link():
    use = link_use(spec_of(8, tp=8), Topology(), "cp")
    assert (use.link, use.size, use.inside, use.across) == (None, 1, 0, 0)


@pytest.mark.parametrize("node", [3, 4, 8])
@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp_shard", "cp"), ("pp", "tp")])
def test_the_worst_group_is_found_without_looking_at_all(axes, node):
    spec = spec_of(180, pp=3, dp_shard=5, cp=4, tp=3)
    crossings, nodes = set(), set()
    for group in spec.groups(*axes):
        on = [rank // node for rank in group]
        crossings.add(sum(a != b for a, b in zip(on, on[1:] + on[:1], strict=True)))
        nodes.add(len(set(on)))
    use = link_use(spec, Topology(node), *axes)
    assert (use.across, use.nodes) == (max(crossings), max(nodes))
    assert use.inside + use.across == use.size
    assert use.uneven or (len(crossings) == 1 and len(nodes) == 1)


def test_tp_across_nodes_is_warned_of_with_its_cost():
    (warning,) = warnings(spec_of(32, dp_shard=2, tp=16), Topology())
    assert (warning.code, warning.axis) == ("tp-across-nodes", "tp")
    # 8 collectives of 15/16 each, and 450 GB/s / 50 GB/s.
    assert "7.5 x batch x sequence x hidden x itemsize" in warning.message
    assert "9 times as long" in warning.message


def test_tp_layer_bytes_follow_the_ring_formula():
    assert tp_layer_factor(2) == 4
    assert tp_layer_factor(8) == 7


def test_hsdp_with_a_sharded_group_beyond_a_node_is_warned_of():
    found = warnings(spec_of(64, dp_replicate=4, dp_shard=16), Topology())
    assert [w.code for w in found] == ["hsdp-across-nodes"]
    assert "spans 2 nodes" in found[0].message
    assert warnings(spec_of(64, dp_replicate=8, dp_shard=8), Topology()) == ()
    assert warnings(spec_of(64, dp_shard=64), Topology()) == ()


def test_only_the_innermost_axis_that_splits_nodes_is_named():
    found = warnings(spec_of(24, pp=2, dp_shard=4, tp=3), Topology())
    assert [(w.code, w.axis) for w in found] == [("tp-across-nodes", "tp"), ("degree-splits-node", "tp")]
    (outer,) = warnings(spec_of(24, pp=2, dp_shard=6, tp=2), Topology())
    assert (outer.code, outer.axis) == ("degree-splits-node", "dp_shard")
    assert "blocks of 12 ranks" in outer.message


def test_a_world_within_one_node_is_never_warned_about():
    assert warnings(spec_of(6, dp_shard=2, tp=3), Topology()) == ()


def test_listed_groups_are_innermost_first_with_the_parameter_group_last():
    spec = spec_of(16, pp=1, dp_shard=2, cp=2, tp=4)
    assert shown_axes(spec) == (("tp",), ("cp",), ("dp_shard",), ("dp_shard", "cp"))
    split = spec.split_axis("tp", {"tp_kv": 2, "tp_rep": 2})
    assert shown_axes(split)[:3] == (("tp",), ("tp_rep",), ("tp_kv",))


def test_an_empty_node_is_refused():
    with pytest.raises(PlanError):
        Topology(node_size=0)
