"""What routed experts are compared with: one device that takes every token and every choice in turn, and ranks that dispatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.mesh.spec import MeshSpec
from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.grouped import grouped_mlp
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.simulated import SimulatedGroups, World

H, F = 5, 3  # odd and unequal on purpose

PARAMETERS = ("up", "down", "up_bias", "down_bias")


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem on all ranks' tokens: `tokens` on each of them, `experts` in all, `k` choices, how they are routed."""

    tokens: tuple[int, ...]
    experts: int = 8
    k: int = 2
    routing: str = "random"
    bias: bool = True


ROUTINGS = "random one idle apart same holes".split()


def indices(case: Case) -> Tensor:
    """int64 [T, k]. one: every first choice is expert 1, and k - 1 others. idle: the last half of the experts idles. apart: a
    token's choices are as far apart as can be. same: one expert takes every choice. holes: some choices have no expert."""
    draw = torch.Generator().manual_seed(case.k + sum(case.tokens))
    total, e = sum(case.tokens), case.experts
    scores = torch.rand(total, e, generator=draw)
    if case.routing == "one":
        scores[:, 1] = 2.0
    if case.routing == "idle":
        scores[:, e // 2 :] -= 1.0
    chosen = scores.topk(case.k, 1).indices
    if case.routing == "apart":
        first = torch.randint(e, (total, 1), generator=draw)
        chosen = (first + torch.arange(case.k) * max(1, e // case.k)) % e
    if case.routing == "same":
        chosen = torch.full_like(chosen, e - 1)
    if case.routing == "holes":
        chosen = torch.where(torch.rand(chosen.shape, generator=draw) < 0.4, -1, chosen)
    return chosen


def tensors(case: Case) -> dict[str, Tensor]:
    """The whole float64 tensors: tokens, weights, grad (of the result), and the experts' packed parameters."""
    draw = torch.Generator().manual_seed(100 * case.experts + case.k)
    total, e = sum(case.tokens), case.experts
    shapes = {
        "tokens": (total, H),
        "weights": (total, case.k),
        "grad": (total, H),
        "up": (e, 2 * F, H),
        "down": (e, H, F),
    }
    shapes |= {"up_bias": (e, 2 * F), "down_bias": (e, H)} if case.bias else {}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def reference(case: Case, seen: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
    """The result, and the gradients of tokens, weights and parameters, token by token and choice by choice; experts see
    `seen(tokens)`, and the gradient is that of what they see."""
    t, chosen = tensors(case), indices(case).tolist()
    t["tokens"] = seen(t["tokens"])
    grad = t.pop("grad")
    t = {name: x.requires_grad_() for name, x in t.items()}
    out = [t["tokens"].new_zeros(H) for _ in chosen]
    for i, choices in enumerate(chosen):
        for j, e in enumerate(choices):
            if e < 0:
                continue
            h = t["up"][e] @ t["tokens"][i]
            h = h + t["up_bias"][e] if case.bias else h
            y = t["down"][e] @ (torch.nn.functional.silu(h[:F]) * h[F:])
            y = y + t["down_bias"][e] if case.bias else y
            out[i] = out[i] + t["weights"][i, j] * y
    whole = torch.stack(out) if out else t["tokens"].sum() * torch.zeros(0, H, dtype=torch.float64)
    loss = (whole * grad).sum() + 0.0 * sum(x.sum() for x in t.values())
    grads = torch.autograd.grad(loss, list(t.values()))
    return {"out": whole.detach(), **dict(zip(t, grads, strict=True))}


def on_rank(case: Case, group: AxisGroup, options: dict[str, Any]) -> dict[str, Tensor]:
    """What one rank computes of a case: its rows of out, tokens and weights, its experts' parameters' gradients."""
    t, rank = tensors(case), group.rank
    rows = slice(sum(case.tokens[:rank]), sum(case.tokens[: rank + 1]))
    chosen = indices(case)[rows]
    mine = {name: t[name][rows].clone().requires_grad_() for name in ("tokens", "weights")}
    params = {name: group.shard(t[name], 0).clone().requires_grad_() for name in PARAMETERS if name in t}

    def body(x: Tensor, counts: tuple[int, ...]) -> Tensor:
        return grouped_mlp(x, counts, **params)

    out = routed_experts(mine["tokens"], chosen, mine["weights"], body, experts=case.experts, group=group, **options)
    out.backward(t["grad"][rows])
    leaves = {**mine, **params}
    return {"out": out.detach(), **{name: x.grad for name, x in leaves.items()}}  # type: ignore[dict-item]


def simulated(case: Case, options: dict[str, Any], work: Callable[..., Any] = on_rank) -> list[Any]:
    """`work(case, group, options)` on as many ranks as the case has. `nodes` of the options becomes `levels`."""
    n, nodes = len(case.tokens), options.get("nodes", 1)
    world = World(n)
    spec = MeshSpec((("ep_out", nodes), ("ep_in", n // nodes)), parents=(("ep_out", "ep"), ("ep_in", "ep")))

    def run(rank: int) -> Any:
        groups = SimulatedGroups(spec, rank, world=world)
        return work(case, groups.group("ep"), levelled(options, groups))

    return world.run(run)


def levelled(options: dict[str, Any], groups: SimulatedGroups) -> dict[str, Any]:
    """`options` of `routed_experts`, with groups for `nodes`."""
    if "nodes" not in options:
        return options
    levels = groups.group("ep_out"), groups.group("ep_in")
    return {name: x for name, x in options.items() if name != "nodes"} | {"levels": levels}


def gloo_levels(nodes: int) -> tuple[AxisGroup, AxisGroup]:
    """The outer and inner group of this rank, of nodes of consecutive ranks; all ranks call it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    size = world // nodes
    members = {"ep_out": [list(range(i, world, size)) for i in range(size)]}
    members["ep_in"] = [list(range(o * size, (o + 1) * size)) for o in range(nodes)]
    found = []
    for axis, lists in members.items():
        made = [(ranks, dist.new_group(ranks)) for ranks in lists]
        mine, group = next((ranks, group) for ranks, group in made if rank in ranks)
        found.append(AxisGroup(axis, len(mine), mine.index(rank), group.group_name))
    return found[0], found[1]


def check(case: Case, ranks: list[dict[str, Tensor]], seen: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """All ranks together have what one device has (see `reference`)."""
    for name, expected in reference(case, seen).items():
        found = torch.cat([r[name] for r in ranks])
        assert all(r[name] is not None for r in ranks)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
