"""What does attention over a split sequence cost on 2 gloo ranks, forward and backward: the ring, its alternatives, torch's own
`context_parallel`, and the limit, which is half of one device's time?

Every way computes the same: results are compared before anything is timed. Ranks take turns at the ways, so that a busy
machine is busy for all. The trace is that of the ring's forward on rank 0: when each hop's transfer began, what was computed
meanwhile, and how long the rank then waited for it, beside what the bare exchange takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Report, arguments
from meshplan.cli.output import emit
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.sequence import Sequence
from meshplan.runtime import comm
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import wire_bytes
from meshplan.verify.pool import RankPool

RANKS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
WAYS = {
    "ring, zigzag": ({"method": "ring"}, "zigzag"),
    "ring, contiguous": ({"method": "ring"}, "contiguous"),
    "ring of peers, zigzag": ({"method": "ring", "transport": "peer"}, "zigzag"),
    "allgather, zigzag": ({"method": "allgather"}, "zigzag"),
    "ulysses": ({"method": "ulysses"}, "contiguous"),
}


def measure(length: int, repeats: int) -> Report:
    with RankPool(RANKS, timeout=1800) as pool:
        ranks: list[dict[str, Any]] = pool.run(_rank, length, repeats, world=RANKS, timeout=1800)
        one: list[float] = pool.run(_one_device, length, repeats, world=1, timeout=1800)[0]
    limit = statistics.median(one) / RANKS
    rows = []
    for way in (*WAYS, "torch context_parallel"):
        took = [max(times) for times in zip(*(r["seconds"].get(way, []) for r in ranks), strict=True)]
        median = statistics.median(took) if took else None
        rows.append(
            {
                "way": way,
                "step s": median,
                "of the limit": median / limit if median else None,
                "MiB sent": ranks[0]["sent"].get(way),
                "error": max((r["error"].get(way, 0.0) for r in ranks), default=None) if took else None,
            }
        )
    trace = ranks[0]["trace"]
    return Report(
        f"causal attention of {length} positions, {HEADS} heads on {KV_HEADS} key heads of {DIM}, float32, {RANKS} gloo ranks",
        rows,
        notes=[
            "measured: median seconds of forward and backward, of the slower rank; error relative to one device",
            "limit: half of the seconds that torch's own attention takes on one device with one thread, measured in this run",
            f"torch context_parallel: {ranks[0]['refused']}" if ranks[0]["refused"] else "torch context_parallel ran",
            *(f"trace, hop {i}: {line}" for i, line in enumerate(trace)),
        ],
        facts={
            "one device s": statistics.median(one),
            "bare exchange of one hop s": ranks[0]["bare"],
            "waited for in the ring's forward s": ranks[0]["waited"],
        },
    )


def _tensors(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, h, length, DIM, generator=made) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    return q, k, v, g


def _one_device(length: int, repeats: int) -> list[float]:
    torch.set_num_threads(1)
    q, k, v, g = _tensors(length)
    return [_timed(lambda: _step(lambda *a: F.scaled_dot_product_attention(*a, is_causal=True, enable_gqa=True), q, k, v, g))[0]
            for _ in range(repeats)]  # fmt: skip


def _step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = attend(q, k, v)
    out.backward(g)
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = run()
    return time.perf_counter() - start, made


def _rank(length: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world: Any = dist.group.WORLD
    group = AxisGroup("cp", RANKS, rank, world.group_name)
    whole = _tensors(length)
    want = _step(lambda *a: F.scaled_dot_product_attention(*a, is_causal=True, enable_gqa=True), *whole)
    found: dict[str, Any] = {"seconds": {}, "error": {}, "sent": {}, "refused": None}
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    for way, (how, balance) in WAYS.items():
        order = Sequence(length, RANKS, balance)
        mine = [order.cut(t, 2, rank) for t in whole]

        attend = partial(context_attention, is_causal=True, enable_gqa=True, group=group, sequence=order, **how)

        steps[way] = partial(_step, attend, *mine)
        got = steps[way]()
        errors = [(a - order.cut(b, 2, rank)).abs().max() / b.abs().max() for a, b in zip(got, want, strict=True)]
        found["error"][way] = float(max(errors))
        found["sent"][way] = _sent(how, order, length)
    peer, found["refused"] = _torch_context_parallel(whole)
    if peer is not None:
        steps["torch context_parallel"] = peer
    for _ in range(repeats):
        for way, step in steps.items():
            dist.barrier()
            found["seconds"].setdefault(way, []).append(_timed(step)[0])
    found |= _trace(whole, group)
    return found


def _sent(how: dict[str, str], order: Sequence, length: int) -> float:
    """MiB that a rank sends a step, counted on abstract groups."""
    total = 0

    def told(op: str, group: AxisGroup, full: Tensor) -> None:
        nonlocal total
        total += wire_bytes(op, full.numel() * full.element_size(), RANKS)

    group = AxisGroup("cp", RANKS, 0, None, told)
    part = length // RANKS
    q, k, v, g = (torch.zeros(1, h, part, DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    _step(partial(context_attention, is_causal=True, enable_gqa=True, group=group, sequence=order, **how), q, k, v, g)
    return total / 2**20


def _torch_context_parallel(whole: tuple[Tensor, ...]) -> tuple[Callable[[], list[Tensor]] | None, str | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))

    def step() -> list[Tensor]:
        # Its ring takes equal numbers of heads.
        q, g = whole[0].clone(), whole[3].clone()
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in whole[1:3])
        with context_parallel(mesh, buffers=[q, k, v, g], buffer_seq_dims=[2, 2, 2, 2]):
            return _step(lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), q, k, v, g)

    try:
        step()
    except Exception as error:  # whatever keeps it from this machine is the answer
        return (
            None,
            f"cannot run on the CPU of torch {torch.__version__}: {type(error).__name__}: {str(error).splitlines()[0]}",
        )
    return step, None


def _trace(whole: tuple[Tensor, ...], group: AxisGroup) -> dict[str, Any]:
    """One forward of the ring, its exchanges watched."""
    order = Sequence(whole[0].shape[2], RANKS, "zigzag")
    q, k, v = (order.cut(t, 2, group.rank) for t in whole[:3])
    bare = []
    for _ in range(5):
        dist.barrier()
        bare.append(_timed(lambda: group.shift(torch.stack([k, v])).wait())[0])
    lines: list[str] = []
    waited = 0.0
    begun = time.perf_counter()
    own_shift, own_wait = AxisGroup.shift, comm.Pending.wait

    def shift(self: AxisGroup, x: Tensor, by: int = 1) -> comm.Pending:
        started = time.perf_counter() - begun
        out = own_shift(self, x, by)
        out.started = started  # type: ignore[attr-defined]
        return out

    def wait(self: comm.Pending) -> Tensor:
        nonlocal waited
        before = time.perf_counter() - begun
        took, made = _timed(lambda: own_wait(self))
        waited += took
        started = getattr(self, "started", before)
        lines.append(
            f"sent from {1e3 * started:.1f} ms on, computed until {1e3 * before:.1f} ms, then waited {1e3 * took:.2f} ms"
        )
        return made

    AxisGroup.shift, comm.Pending.wait = shift, wait  # type: ignore[method-assign]
    try:
        dist.barrier()
        begun = time.perf_counter()
        with torch.no_grad():
            context_attention(q, k, v, is_causal=True, enable_gqa=True, group=group, sequence=order, method="ring")
    finally:
        AxisGroup.shift, comm.Pending.wait = own_shift, own_wait  # type: ignore[method-assign]
    return {"trace": lines, "waited": waited, "bare": statistics.median(bare)}


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--length", type=int, default=8192, help="positions of the whole sequence")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    emit(measure(given.length, given.repeats), given.json)
