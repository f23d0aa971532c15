"""Times of collectives by the formula latency + bytes / rate, on the link that an axis' groups run on."""

from __future__ import annotations

import pytest

from meshplan.cost.machine import Cost, Machine
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import Topology

MACHINE = Machine(topology=Topology(node_size=4, inside=400e9, across=50e9), latency=(4e-6, 1e-6), latency_across=10e-6)


def test_an_axis_inside_a_node_runs_at_nvlinks_rate_and_one_across_at_the_networks():
    spec = MeshSpec.resolve({"dp_shard": 2, "tp": 4}, 8)
    tp, dp = MACHINE.link(spec, "tp"), MACHINE.link(spec, "dp_shard")
    assert (tp.ranks, tp.rate, tp.latency) == (4, 400e9, pytest.approx(7e-6))
    assert (dp.ranks, dp.rate, dp.latency) == (2, 50e9, pytest.approx(14e-6))


def test_a_collectives_time_is_its_latency_and_its_rings_bytes():
    link = MACHINE.link(MeshSpec.resolve({"tp": 4}, 4), "tp")
    nbytes = 1 << 20
    assert link.seconds("all_gather", nbytes) == pytest.approx(7e-6 + 0.75 * nbytes / 400e9)
    assert link.seconds("all_reduce", nbytes) == pytest.approx(7e-6 + 1.5 * nbytes / 400e9)
    assert link.cost("all_reduce", nbytes) == Cost(link.seconds("all_reduce", nbytes), 1.5 * nbytes, link.latency)


def test_costs_add_and_scale():
    assert (Cost(1, 2, 0.5) + Cost(3, 4, 0.25)) * 2 == Cost(8, 12, 1.5)
