"""How much host time does a step cost on 8 tensor-parallel ranks: one device, meshplan, torch's `parallelize_module`?

Hidden sizes are small, so that what the CPU does around the kernels decides, as it does on a GPU that outruns its host.
The ranks are in name only (fake process group): collectives cost their dispatch and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import meshplan as mp
from benchmarks.common import Report, arguments, fake_world, interleaved
from meshplan import compat
from meshplan.cli.output import emit
from meshplan.models.llama import Block, LlamaConfig

RANKS = 8
HEAD_WIDTH = 8
TARGET_SINGLE = 1.8
TARGET_PEER = 3.5


class Blocks(nn.Module):
    """The blocks of a Llama, without what stands before and after them."""

    def __init__(self, n_layers: int, qk_norm: bool) -> None:
        super().__init__()
        dim = RANKS * HEAD_WIDTH
        config = LlamaConfig(
            dim=dim, n_layers=n_layers, n_heads=RANKS, n_kv_heads=RANKS, ffn_dim=2 * dim, vocab_size=1, qk_norm=qk_norm
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(n_layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def sequence_plan(batch: int, seq: int) -> mp.Plan:
    """Tensor and sequence parallelism of `Blocks`; the input comes and the output leaves split along the sequence."""
    sequence = {"tp": mp.S(1)}
    angles = mp.Input(shape=(seq, 1, HEAD_WIDTH // 2), dtype=torch.float32)
    x = mp.Input(shape=(batch, seq, RANKS * HEAD_WIDTH), dtype=torch.float32, place=sequence)
    return mp.Plan(
        mesh={"tp": RANKS},
        inputs={"x": x, "cos": angles, "sin": angles},
        rules=[
            mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
            mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
            mp.Rule("layers.*.attention.wo", use="rowwise", output=sequence),
            mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
            mp.Rule("layers.*.feed_forward.w2", use="rowwise", output=sequence),
            mp.Rule("", output=sequence),
        ],
    )


def by_hand(model: Blocks) -> Blocks:
    """The same with torch's own styles, as torchtitan writes them; each layer returns local tensors."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.layers:
        # These norms see whole heads: sharded along the heads' dim, each on its own.
        qk_norms = {f"attention.{x}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for x in "qk"}
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                **({} if block.attention.q_norm is None else qk_norms),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def at_local_sizes(model: Blocks) -> Blocks:
    """One rank's share of the matrices as plain parameters, without any communication: it computes something else, at
    the cost that no lowering can go below."""
    for block in model.layers:
        attention, mlp = block.attention, block.feed_forward
        columns, rows = (attention.wq, attention.wk, attention.wv, mlp.w1, mlp.w3), (attention.wo, mlp.w2)
        for linear in (*columns, *rows):
            share = linear.weight.detach().chunk(RANKS, 0 if linear in columns else 1)[0]
            linear.weight = nn.Parameter(share.clone())
    return model


def bare_collectives(low: mp.Lowered, like: Tensor) -> Callable[[], None]:
    """The program's collectives and nothing around them: same operators, count and sizes."""
    gather, scatter, reduce, _, wait = compat.functional_collectives()
    name = torch.distributed.group.WORLD.group_name
    calls = []
    for c in low.collectives:
        full = like.new_zeros(c.elements)
        if c.op == "all_gather":
            calls.append((gather, (full.chunk(RANKS)[0].clone(), RANKS, name)))
        elif c.op == "reduce_scatter":
            calls.append((scatter, (full, "sum", RANKS, name)))
        else:
            calls.append((reduce, (full, "sum", name)))

    def run() -> None:
        with compat.below_autograd():
            for op, args in calls:
                wait(op(*args))

    return run


def step(model: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Forward and backward of `model`; gradients are dropped first, as `zero_grad` does."""
    parameters = list(model.parameters())

    def run() -> None:
        for p in parameters:
            p.grad = None
        model(x, *angles).sum().backward()

    return run


def measure(layers: int, rounds: int, batch: int, seq: int, qk_norm: bool) -> Report:
    """Time all subjects in one run. `seq` is the global sequence length, divided by the ranks."""
    torch.manual_seed(0)
    angles = (torch.randn(seq, 1, HEAD_WIDTH // 2), torch.randn(seq, 1, HEAD_WIDTH // 2))
    whole = torch.randn(batch, seq, RANKS * HEAD_WIDTH, requires_grad=True)
    part = whole.detach()[:, : seq // RANKS].clone().requires_grad_()
    with fake_world(RANKS):
        lowered = mp.parallelize(Blocks(layers, qk_norm), sequence_plan(batch, seq))
        low = mp.lowered(lowered)
        times = interleaved(
            {
                "one device": step(Blocks(layers, qk_norm), whole, angles),
                "  a rank's matrices, no communication": step(at_local_sizes(Blocks(layers, qk_norm)), whole, angles),
                "  its collectives, bare": bare_collectives(low, part.detach()),
                "meshplan": step(lowered, part, angles),
                "parallelize_module": step(by_hand(Blocks(layers, qk_norm)), part, angles),
            },
            rounds,
        )
    single, local, bare, ours, peer = (times[name] for name in times)
    rows = [
        {"program": name, "ms": t.median, "low ms": t.low, "x one device": t.median / single.median}
        for name, t in times.items()
    ]
    views = sum(p.requires_grad for p in lowered.parameters())
    moves = sum(c.what != "gradients" and c.phase == "forward" for c in low.collectives)
    return Report(
        f"host time of forward + backward: {layers} blocks, tp {RANKS} + sp, batch {batch} x {seq}"
        + (", q and k norms" if qk_norm else ""),
        rows,
        notes=[
            f"measured: CPU time of one thread, median and first decile of {rounds} rounds, all programs in turn",
            "the floor is a rank's own computation and the collectives' dispatch, with nothing to connect them",
            f"above it: {views} parameters seen as local shards and {moves} moves, each an autograd node",
            "GPU: not measured",
        ],
        facts={
            "meshplan / one device": ours.median / single.median,
            "parallelize_module / meshplan": peer.median / ours.median,
            "floor / one device": (local.median + bare.median) / single.median,
            "meshplan above the floor, ms": ours.median - local.median - bare.median,
            "collectives": len(low.collectives),
            f"at most {TARGET_SINGLE}x one device": ours.median <= TARGET_SINGLE * single.median,
            f"at least {TARGET_PEER}x below parallelize_module": peer.median >= TARGET_PEER * ours.median,
        },
    )  # fmt: skip


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2 * RANKS, help=f"global, a multiple of {RANKS}")
    parser.add_argument("--qk-norm", action="store_true", help="with the q and k norms of Qwen 3")
    given = parser.parse_args()
    emit(measure(given.layers, given.rounds, given.batch, given.seq, given.qk_norm), given.json)
