"""Does a lowered Llama move more bytes than the composition needs, or than the hand-written peer moves?

On 4 gloo ranks: bytes of a step counted from the comm graph, beside the papers' formula, and beside what the lowered
program and its peer in `parallelize_module` + `fully_shard` (DDP for ddp) were recorded to send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import meshplan as mp
from benchmarks.common import Report, arguments
from meshplan.cli.output import emit
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.runtime.recorder import record_collectives
from meshplan.verify.inputs import make_batch
from meshplan.verify.peer import peer
from meshplan.verify.pool import LocalPool, RankPool

WORLD = 4
BATCH, SEQ = 8, 24
WIDTH = torch.float32.itemsize
COUNT = torch.int64.itemsize  # the number of valid labels, over data ranks
CONFIG = LlamaConfig(dim=64, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=96, vocab_size=128)


@dataclass(frozen=True)
class Sizes:
    """What the formulas speak of, for one rank, in bytes.

    Attributes:
        L: blocks.
        A: the residual stream of the tokens that a data rank sees, whole.
        T: one number for each of these tokens.
        N: the weights of one norm.
        B, W: the parameters of all blocks, and those outside (embedding, head, last norm), as tensor parallelism
            leaves them on a rank.
        n: ranks that FSDP shards over.
    """

    L: int
    A: int
    T: int
    N: int
    B: int
    W: int
    n: int

    @classmethod
    def of(cls, c: LlamaConfig, mesh: dict[str, int]) -> Sizes:
        tp, n, copies = mesh.get("tp", 1), mesh.get("dp_shard", 1), mesh.get("dp_replicate", 1)
        tokens = BATCH // (n * copies) * SEQ
        heads = (2 * c.n_heads + 2 * c.n_kv_heads) * c.head_width
        block = c.dim * (heads + 3 * c.ffn_dim) // tp + 2 * c.dim
        outside = 2 * c.vocab_size * c.dim // tp + c.dim
        return cls(
            L=c.n_layers,
            A=tokens * c.dim * WIDTH,
            T=tokens * WIDTH,
            N=c.dim * WIDTH,
            B=c.n_layers * block * WIDTH,
            W=outside * WIDTH,
            n=n,
        )


@dataclass(frozen=True)
class Composition:
    """A shipped plan on a mesh, and its bytes by formula: as text, as a function, and where it comes from."""

    plan: str
    mesh: dict[str, int]
    text: str
    count: Callable[[Sizes], int]
    source: str

    def made(self) -> mp.Plan:
        plan = mp.load_plan(f"llama3/{self.plan}")
        inputs = {name: dataclasses.replace(item, shape=(BATCH, SEQ)) for name, item in plan.inputs.items()}
        return dataclasses.replace(plan, mesh=self.mesh, inputs=inputs)


COMPOSITIONS = (
    Composition("tp", {"tp": 4}, "(4L+2) A + 3T", lambda s: (4 * s.L + 2) * s.A + 3 * s.T, "Shoeybi 2019, sec. 3"),
    Composition(
        "tp_sp", {"tp": 4}, "(8L+4) A + 3T + (2L+1) N",
        lambda s: (8 * s.L + 4) * s.A + 3 * s.T + (2 * s.L + 1) * s.N, "Korthikanti 2022, sec. 4.2",
    ),
    Composition("ddp", {"dp_replicate": 4}, "B + W + 8", lambda s: s.B + s.W + COUNT, "Li 2020, sec. 3"),
    Composition(
        "fsdp", {"dp_shard": 4}, "3B + 2W + 8", lambda s: 3 * s.B + 2 * s.W + COUNT, "Rajbhandari 2020, sec. 7.2",
    ),
    Composition(
        "hsdp", {"dp_replicate": 2, "dp_shard": 2}, "3B + 2W + (B+W)/n + 8",
        lambda s: 3 * s.B + 2 * s.W + (s.B + s.W) // s.n + COUNT, "Zhao 2023, sec. 3.2.2",
    ),
    Composition(
        "tp_sp_fsdp", {"dp_shard": 2, "tp": 2}, "3B + 2W + (8L+4) A + 3T + (2L+1) N/n + 8",
        lambda s: 3 * s.B + 2 * s.W + (8 * s.L + 4) * s.A + 3 * s.T + (2 * s.L + 1) * s.N // s.n + COUNT,
        "the two above together",
    ),
)  # fmt: skip


def recorded(plan: mp.Plan) -> tuple[int, int]:
    """On one rank: the bytes that the lowered program and its peer move in a step (warm: the second one)."""
    model = mp.parallelize(Llama(CONFIG), plan)
    core = mp.lowered(model).core
    batch = mp.shard_batch(model, make_batch(plan.inputs, core.spec, Llama(CONFIG), seed=0))
    by_hand = peer(Llama(CONFIG), core)
    return _second(lambda: model(**batch).backward()), _second(lambda: by_hand.forward_backward(batch))


def _second(step: Callable[[], Any]) -> int:
    step()
    with record_collectives() as log:
        step()
    return sum(c.bytes for c in log)


def measure(pool: RankPool, compositions: tuple[Composition, ...] = COMPOSITIONS) -> Report:
    """One row a composition; `pool` has at least 4 ranks."""
    rows = []
    for composition in compositions:
        plan = composition.made()
        low = mp.lower(Llama(CONFIG), plan, world_size=WORLD)
        ours, by_hand = pool.run(recorded, plan, world=WORLD)[0]
        counted, floor = sum(c.bytes for c in low.collectives), composition.count(Sizes.of(CONFIG, composition.mesh))
        rows.append({
            "plan": composition.plan,
            "mesh": " x ".join(f"{axis} {n}" for axis, n in composition.mesh.items()),
            "counted": counted,
            "formula": floor,
            "recorded": ours,
            "peer recorded": by_hand,
            "at the floor": counted == floor == ours,
            "at most the peer": ours <= by_hand,
            "formula in words": composition.text,
            "source": composition.source,
        })  # fmt: skip
    return Report(
        f"bytes a step: {CONFIG.n_layers} Llama blocks of {CONFIG.dim}, {BATCH} x {SEQ} tokens, float32, {WORLD} ranks",
        rows,
        notes=[
            "counted: bytes of the full tensor of every collective of a rank, forward and backward",
            "A residual stream, T a number a token, N a norm's weights, B blocks, W outside them, n sharding ranks; 8: "
            "the count of valid labels",
            "recorded: what rank 0 issued to gloo in its second step; the peer counts labels and sums gradients too",
        ],
        facts={"all at the floor": all(r["at the floor"] and r["at most the peer"] for r in rows)},
    )


if __name__ == "__main__":
    given = arguments(__doc__).parse_args()
    # Ranks import this module by its name, which it does not have when it runs as a script.
    from benchmarks import comm_floor

    with LocalPool(WORLD) as ranks:
        emit(comm_floor.measure(ranks), given.json)
