"""Ownership read off layouts: which groups split a parameter, across slices and flattenings of one mesh."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshplan.runtime.ownership import Ownership, declare, ownerships


def _parameter(mesh, placements, gradient=None) -> nn.Parameter:
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, placements))
    if gradient is not None:
        parameter.grad = DTensor.from_local(torch.zeros(2, 2), mesh, gradient)
    return parameter


def _read() -> list[tuple[list[str], list[str], str | None]]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    parameters = [
        nn.Parameter(torch.zeros(2)),
        _parameter(mesh["dp", "tp"], [Shard(0), Shard(1)]),
        _parameter(mesh["dp", "tp"], [Shard(0), Replicate()]),
        _parameter(mesh["dp", "tp"]._flatten("dp_tp"), [Shard(0)]),
        _parameter(mesh["tp"], [Replicate()], [Partial()]),
        _parameter(alone, [Shard(0)]),
    ]
    found = ownerships(parameters)
    axes = [([g.axis for g in o.split], [g.axis for g in o.partial], o.stages and o.stages.axis) for o in found]
    return axes


def test_groups_of_one_rank_split_nothing_and_pp_is_the_pipeline(pool):
    expected = [
        ([], [], None),
        (["tp"], [], "pp"),
        ([], [], "pp"),
        (["dp_tp"], [], "pp"),
        ([], ["tp"], "pp"),
        (["ep"], [], None),
    ]
    assert pool.run(_read) == [expected] * 4


def test_what_was_declared_holds():
    parameter = nn.Parameter(torch.zeros(2))
    declare(parameter, Ownership(counted=False))
    assert ownerships([parameter, nn.Parameter(torch.zeros(2))]) == [Ownership(counted=False), Ownership()]
