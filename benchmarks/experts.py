"""How many tokens a second do routed experts take on 4 gloo ranks, forward and backward: ours, transformers' expert
parallelism, and an `all_to_all_single` loop as a person writes it?

The layer is that of Qwen3-30B-A3B at an eighth of its widths (H 256, F 96, 128 experts, top 8), with its router. Two settings:
each rank has tokens of its own (ep borrowed from data ranks), or all have the same ones (from tp), where transformers also has
its `all_reduce`. Every way is first held against one device: result, and the gradients of tokens, router and experts. Ranks take
turns at the ways, so that a busy machine is busy for all.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Report, arguments
from meshplan.cli.output import emit
from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.grouped import grouped_mlp
from meshplan.ops.experts.layout import TokenLayout
from meshplan.runtime.comm import AxisGroup
from meshplan.verify.pool import RankPool

RANKS, H, WIDTH, EXPERTS, K = 4, 256, 96, 128, 8
OURS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dedup": {"dedup": True},
    "allgather": {"dispatch": "allgather", "equal": True},
}
SETTINGS = ("own tokens", "same tokens")
TOLERANCE = 1e-4
"""Of the largest number of each tensor: float32, summed in other orders."""


def measure(pool: RankPool, tokens: int, repeats: int) -> Report:
    """`tokens` of all ranks together."""
    ranks = pool.run(_rank, tokens, repeats, world=RANKS, timeout=3600)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for setting in SETTINGS:
        seconds, spent = (
            {
                way: [together(times) for times in zip(*(r[setting][clock][way] for r in ranks), strict=True)]
                for way in ranks[0][setting][clock]
            }
            for clock, together in (("seconds", max), ("spent", sum))
        )
        medians = {way: statistics.median(took) for way, took in seconds.items()}
        best = min((way for way in medians if not way.startswith("ours")), key=medians.__getitem__)
        thriftiest = min(statistics.median(took) for way, took in spent.items() if not way.startswith("ours"))
        for way, took in seconds.items():
            rows.append(
                {
                    "setting": setting,
                    "way": way,
                    "tokens/s": tokens / medians[way],
                    "step ms": 1e3 * medians[way],
                    "of the best other": statistics.median(b / t for b, t in zip(seconds[best], took, strict=True)),
                    "CPU ms": 1e3 * statistics.median(spent[way]),
                    "of the least other": thriftiest / statistics.median(spent[way]),
                    "error": max(r[setting]["error"][way] for r in ranks),
                }
            )
        facts[f"{setting}: the best other"] = best
    return Report(
        f"{tokens} tokens, {EXPERTS} experts of {H} x {WIDTH}, top {K}, float32, {RANKS} gloo ranks of one thread",
        rows,
        notes=[
            "measured: median wall time of forward and backward, of the slowest rank",
            "of the best other: its time over this one's, the median over rounds; above 1 is faster",
            "of the least other: the least CPU time of the others over this one's",
            "CPU ms: of all ranks together, with their threads: what waiting for a core or a peer does not add to",
            f"error: largest difference from one device over the largest number of a result or gradient (at most {TOLERANCE})",
        ],
        facts=facts,
    )


def _rank(tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    found = {}
    for setting in SETTINGS:
        ways = _ways(setting)
        x, grad = _data(tokens)
        if setting == "own tokens":
            x, grad = (t.chunk(RANKS)[dist.get_rank()] for t in (x, grad))
        want = _expected(tokens, setting)
        errors: dict[str, float] = {}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for way, block in ways.items():
            errors[way] = _difference(_step(block, x, grad), want)
            assert errors[way] < TOLERANCE, f"{way} on {setting}: {errors[way]}"
        for _ in range(repeats):
            for way, block in ways.items():
                block.zero_grad()
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                block(x.requires_grad_()).backward(grad)
                seconds[way].append(time.perf_counter() - start)
                spent[way].append(time.process_time() - busy)
        found[setting] = {"seconds": seconds, "spent": spent, "error": errors}
    return found


def _data(tokens: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(tokens, H, generator=draw), torch.randn(tokens, H, generator=draw)


@functools.cache
def _weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"gate": (EXPERTS, H), "up": (EXPERTS, 2 * WIDTH, H), "down": (EXPERTS, H, WIDTH)}
    return {name: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 for name, shape in shapes.items()}


class Block(nn.Module):
    """The router, and experts that are somebody's: `experts(x, indices, weights)`."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Parameter(_weights()["gate"].clone())
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        scores, indices = F.linear(x, self.gate).softmax(-1).topk(K, -1)
        return self.experts(x, indices, scores / scores.sum(-1, keepdim=True))  # type: ignore[no-any-return]


class Held(nn.Module):
    """This rank's experts: all of them on one device."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        w = _weights()
        self.up, self.down = (nn.Parameter(w[name].chunk(ranks)[rank].clone()) for name in ("up", "down"))


class OneDevice(Held):
    """Every expert in turn."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, place = torch.where(indices == e)
            gate, up = F.linear(x[token], self.up[e]).chunk(2, -1)
            out = out.index_add(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, place, None])
        return out


class Ours(Held):
    def __init__(self, group: AxisGroup, shared: bool, options: dict[str, Any]) -> None:
        super().__init__(group.rank, group.size)
        self.given = {"experts": EXPERTS, "group": group, **options}
        if shared:
            self.given["layout"] = TokenLayout(copies=group)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        body = lambda rows, counts: grouped_mlp(rows, counts, self.up, self.down)  # noqa: E731
        return routed_experts(x, indices, weights, body, **self.given)


class TheirExperts(nn.Module):
    """Our dispatch, and transformers' experts on the rows that arrive, as a plan's lowering runs a model's own code."""

    def __init__(self, group: AxisGroup, shared: bool, kernel: str) -> None:
        super().__init__()
        self.own = _their_experts(kernel, group.rank, group.size)
        self.given: dict[str, Any] = {"experts": EXPERTS, "group": group}
        if shared:
            self.given["layout"] = TokenLayout(copies=group)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        def body(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
            ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            return self.own(rows, ids[:, None], rows.new_ones(len(rows), 1))  # type: ignore[no-any-return]

        return routed_experts(x, indices, weights, body, **self.given)


class Plain(Held):
    """What one writes who has read about expert parallelism."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, RANKS)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

        def exchange(x: Tensor, receive: list[int], send: list[int]) -> Tensor:
            return wait_tensor(all_to_all_single_autograd(x, receive, send, dist.group.WORLD))  # type: ignore[no-any-return]

        flat = indices.flatten()
        order = flat.argsort()
        token = order // K
        counts = torch.bincount(flat, minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        local = EXPERTS // RANKS
        send, receive = (c.view(RANKS, local).sum(1).tolist() for c in (counts, arriving))
        rows = x[token]
        got = exchange(rows, receive, send)
        ids = torch.arange(local).repeat(RANKS).repeat_interleave(arriving)
        results = torch.zeros_like(got)
        for e in range(local):
            mine = (ids == e).nonzero().squeeze(1)
            gate, up = F.linear(got[mine], self.up[e]).chunk(2, -1)
            results = results.index_add(0, mine, F.linear(F.silu(gate) * up, self.down[e]))
        home = exchange(results, send, receive)
        return torch.zeros_like(x).index_add(0, token, home * weights.flatten()[order, None])


def _their_experts(kernel: str, rank: int = 0, ranks: int = 1) -> nn.Module:
    """transformers' experts of this rank."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=H,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS // ranks,
        num_experts_per_tok=K,
        hidden_act="silu",
    )
    config._experts_implementation = kernel
    experts = Qwen3MoeExperts(config)
    w = _weights()
    with torch.no_grad():
        experts.gate_up_proj.copy_(w["up"].chunk(ranks)[rank])
        experts.down_proj.copy_(w["down"].chunk(ranks)[rank])
    return experts


def _transformers(shared: bool, implementation: str, kernel: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    block = Block(_their_experts(kernel))
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))
    # Its plan for this model, with paths from the block.
    prefix = "layers.*.mlp."
    plan = {path.removeprefix(prefix): style for path, style in (Qwen3MoeConfig.base_model_ep_plan or {}).items()}
    tp = mesh["ep"] if shared else mesh["tp"]
    return apply_expert_parallelism(block, mesh["ep"], tp, plan, implementation)


def _ways(setting: str) -> dict[str, nn.Module]:
    shared = setting == "same tokens"
    world: Any = dist.group.WORLD
    group = AxisGroup("ep", RANKS, dist.get_rank(), world.group_name)
    ways: dict[str, nn.Module] = {
        f"ours, {name}": Block(Ours(group, shared, options))
        for name, options in OURS.items()
        if not (shared and name == "allgather")
    }
    for kernel in ("grouped_mm", "eager"):
        ways[f"ours, alltoall, their experts, {kernel}"] = Block(TheirExperts(group, shared, kernel))
        ways[f"transformers all_to_all, {kernel}"] = _transformers(shared, "all_to_all", kernel)
        if shared:
            ways[f"transformers all_reduce, {kernel}"] = _transformers(shared, "all_reduce", kernel)
    if not shared:
        ways["plain all_to_all_single"] = Block(Plain(group.rank))
    return ways


def _step(block: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Result, and gradients of tokens, router and this rank's experts, as plain tensors."""
    x = x.detach().clone().requires_grad_()
    block.zero_grad()
    out = block(x)
    out.backward(grad)
    grads = [p.grad for p in block.parameters()]
    found = [out.detach(), x.grad, *(g.to_local() if hasattr(g, "to_local") else g for g in grads)]
    return found  # type: ignore[return-value]


def _expected(tokens: int, setting: str) -> list[Tensor]:
    """Of one device, this rank's part of each."""
    rank = dist.get_rank()
    x, grad = _data(tokens)
    out, dx, gate, up, down = _step(Block(OneDevice()), x, grad)
    up, down = (t.chunk(RANKS)[rank] for t in (up, down))
    if setting == "same tokens":
        return [out, dx, gate, up, down]
    # A router sees its rank's tokens only; its gradients would be summed over data ranks.
    own_x, own_grad = (t.chunk(RANKS)[rank] for t in (x, grad))
    gate = _step(Block(OneDevice()), own_x, own_grad)[2]
    return [out.chunk(RANKS)[rank], dx.chunk(RANKS)[rank], gate, up, down]


def _difference(found: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, want, strict=True))


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of all ranks together")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    with RankPool(RANKS) as ranks:
        emit(measure(ranks, given.tokens, given.repeats), given.json)
