"""A whole MoE block with its router and losses, folded onto meshes: parameters' gradients are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshplan.mesh.expert_view import expert_view
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.experts.balance import load_balance_loss, z_loss
from meshplan.ops.experts.capacity import limit
from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.grouped import grouped_mlp
from meshplan.ops.token_mean import token_mean
from meshplan.runtime.simulated import SimulatedGroups, World

E, H, F, K = 4, 5, 3, 2
TOKENS = (4, 0, 7, 2)
AVERAGED = ("dp_replicate", "dp_shard", "cp")


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (sum(TOKENS), H), "router": (E, H), "up": (E, 2 * F, H), "down": (E, H, F), "shared": (H, H)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x @ router.T
    weights, chosen = logits.softmax(-1).topk(K, 1)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def one_device(factor: float | None) -> dict[str, Tensor]:
    """Written out without any of the operators but `limit`, whose own test has a reference."""
    t = {name: x.requires_grad_() for name, x in tensors().items()}
    logits, weights, chosen = routed(t["x"], t["router"])
    if factor is not None:
        alone = SimulatedGroups(MeshSpec(()), 0).group("dp_shard")
        kept = limit(chosen, weights, experts=E, capacity_factor=factor, group=alone)
        assert int((kept < 0).sum()) > 0
    else:
        kept = chosen
    h = torch.einsum("th,tkfh->tkf", t["x"], t["up"][chosen])
    y = torch.einsum("tkf,tkhf->tkh", torch.nn.functional.silu(h[..., :F]) * h[..., F:], t["down"][chosen])
    out = (torch.where(kept < 0, 0.0, weights)[..., None] * y).sum(1) + t["x"] @ t["shared"]
    loss = out.square().sum(-1).mean()
    share = torch.nn.functional.one_hot(chosen, E).double().sum((0, 1)) / len(chosen)
    loss = loss + 0.1 * E * (share * logits.softmax(-1).mean(0)).sum() + 0.2 * (logits.logsumexp(-1) ** 2).mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in t.items()}}  # type: ignore[dict-item]


def on_rank(rank: int, spec: MeshSpec, ep: int, world: World, options: dict[str, Any]) -> dict[str, Tensor]:
    options, view = dict(options), expert_view(spec, ep)
    factor = options.pop("capacity_factor", None)
    groups = SimulatedGroups(view.spec, rank, world=world)
    everyone, copies, experts = (groups.group(*axes) for axes in (spec.names, view.axes("expert_dp"), view.axes("ep")))
    t = tensors()
    mine = {"x": t["x"].split(TOKENS)[rank]} | {name: t[name] for name in ("router", "shared")}
    mine |= {name: experts.shard(t[name], 0) for name in ("up", "down")}
    mine = {name: x.clone().requires_grad_() for name, x in mine.items()}
    data = spec.degree(*AVERAGED)
    logits, weights, chosen = routed(mine["x"], mine["router"])
    kept = limit(chosen, weights, experts=E, capacity_factor=factor, group=everyone)
    out = routed_experts(
        mine["x"], kept, weights, lambda x, c: grouped_mlp(x, c, mine["up"], mine["down"]),
        experts=E, group=experts, **options,
    )  # fmt: skip
    over = {"groups": [everyone], "data_ranks": data}
    loss = token_mean((out + mine["x"] @ mine["shared"]).square().sum(-1), **over)
    loss = loss + 0.1 * load_balance_loss(logits.softmax(-1), chosen, **over) + 0.2 * z_loss(logits, **over)
    loss.backward()
    grads = {name: x.grad / data for name, x in mine.items() if name == "x"}
    # Summed over tp, averaged over data ranks: over all ranks, by the number of data ranks.
    grads |= {name: everyone.all_reduce(mine[name].grad) / data for name in ("router", "shared")}
    whole = {name: copies.all_reduce(mine[name].grad) / view.gradient_divisor for name in ("up", "down")}
    grads |= {name: experts.all_gather(x, 0) for name, x in whole.items()}
    return {"loss": everyone.all_reduce(loss.detach()) / data, **grads}


@pytest.mark.parametrize(
    "options", [{}, {"dedup": True}, {"dispatch": "allgather"}, {"capacity_factor": 0.75}], ids=str
)
@pytest.mark.parametrize(
    "axes, ep",
    [
        ({"dp_shard": 4}, 4),
        ({"dp_shard": 4}, 2),  # expert_dp 2: dividing by it would be ep times too much
        ({"dp_replicate": 2, "dp_shard": 2}, 2),
        ({"dp_shard": 2, "cp": 2}, 4),
        ({"dp_shard": 2, "tp": 2}, 4),  # sequence parallel: tp ranks have tokens of their own
        ({"dp_shard": 2, "tp": 2}, 2),
        ({"tp": 4}, 2),
    ],
    ids=str,
)
def test_a_block_has_the_loss_and_gradients_of_one_device(axes, ep, options):
    spec = MeshSpec(tuple(axes.items()))
    world = World(spec.world_size)
    ranks = world.run(lambda rank: on_rank(rank, spec, ep, world, options))
    for name, expected in one_device(options.get("capacity_factor")).items():
        found = [torch.cat([r["x"] for r in ranks])] if name == "x" else [r[name] for r in ranks]
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
