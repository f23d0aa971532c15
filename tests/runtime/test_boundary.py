"""Every move between kinds holds by value: the result is laid out as promised, and so is the gradient of the input."""

from __future__ import annotations

import pytest
import torch

from meshplan.compiler.kinds import A, I, Kind, N, P, R
from meshplan.compiler.pieces import gather, gather_gradient, spread, spread_gradient
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.runtime.boundary import MOVES, collectives_of, move
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.simulated import SimulatedGroups, World

KINDS: dict[str, Kind] = {"R": R, "I": I, "N": N, "P": P, "A": A, "S": Shard(1)}
SCALED = {("P", "A")}


@pytest.mark.parametrize("length", [6, 7, 2])
@pytest.mark.parametrize(("src", "dst"), [pair for pair in MOVES if "N" not in pair])
def test_a_move_and_its_mate_hold_by_value(src, dst, length):
    n = 3
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    g = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    pieces = spread(x, KINDS[src], n, generator)
    pulls = spread_gradient(g, KINDS[dst], n, generator)
    world, spec = World(n), MeshSpec((("tp", n),))

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = SimulatedGroups(spec, rank, world=world).group("tp")
        local = pieces[rank].clone().requires_grad_()
        out = move(local, src, dst, group, 1, length)
        out.backward(pulls[rank])
        assert local.grad is not None
        return out.detach(), local.grad

    ran = world.run(work)
    made = gather([out for out, _ in ran], KINDS[dst], x.shape)
    back = gather_gradient([grad for _, grad in ran], KINDS[src], x.shape)
    assert made is not None and torch.allclose(made, x, atol=1e-12)
    assert back is not None and torch.allclose(back, g, atol=1e-12)


@pytest.mark.parametrize(("src", "dst"), [pair for pair in MOVES if "S" in pair and "N" not in pair])
def test_fused_parts_are_put_in_order_and_back(src, dst):
    n, fused = 3, Shard(1, (3, 6, 3))
    kinds = {**KINDS, "S": fused}
    generator = torch.Generator().manual_seed(5)
    x, g = (torch.randn(2, 12, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    pieces, pulls = spread(x, kinds[src], n, generator), spread_gradient(g, kinds[dst], n, generator)
    world, spec = World(n), MeshSpec((("tp", n),))

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        local = pieces[rank].clone().requires_grad_()
        out = move(local, src, dst, SimulatedGroups(spec, rank, world=world).group("tp"), 1, 12, fused.parts)
        out.backward(pulls[rank])
        assert local.grad is not None
        return out.detach(), local.grad

    ran = world.run(work)
    made = gather([out for out, _ in ran], kinds[dst], x.shape)
    back = gather_gradient([grad for _, grad in ran], kinds[src], x.shape)
    assert made is not None and torch.allclose(made, x, atol=1e-12)
    assert back is not None and torch.allclose(back, g, atol=1e-12)


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward"),
    [
        ("S", "R", "all_gather", "reduce_scatter"),
        ("S", "I", "all_gather", None),
        ("P", "S", "reduce_scatter", "all_gather"),
        ("P", "I", "all_reduce", None),
        ("I", "R", None, "all_reduce"),
        ("I", "S", None, "all_gather"),
        ("R", "S", None, None),
        ("I", "P", None, None),
    ],
)
def test_what_a_move_sends_each_way(src, dst, forward, backward):
    assert collectives_of(src, dst) == (forward, backward)


def test_an_abstract_group_is_told_of_padding():
    heard = []
    group = AxisGroup("tp", 4, 1, None, lambda op, g, full: heard.append((op, g.axis, tuple(full.shape))))
    out = move(torch.zeros(3, 2), "S", "R", group, 0, 10)  # ceil(10 / 4) = 3 rows a rank, 12 on the wire
    assert tuple(out.shape) == (10, 2)
    assert heard == [("all_gather", "tp", (12, 2))]
