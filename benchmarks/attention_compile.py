"""What the attention kernels become on Hopper: each shipped configuration, compiled for sm_90 without a GPU and counted.

python -m benchmarks.attention_compile                                    # the table; fails where a register is spilled
python -m benchmarks.attention_compile --page docs/attention_kernels.md   # and writes it into the page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import triton

from benchmarks.kernel_table import MEMORY, SHARED, TENSOR, Script, compiled
from meshplan.kernels.attention import peer_ring
from meshplan.kernels.attention.backward import dkdv_kernel, dq_kernel
from meshplan.kernels.attention.block import new_state
from meshplan.kernels.attention.forward import forward_kernel
from meshplan.kernels.attention.launch import (
    Docs,
    backward_launches,
    delta_launch,
    finish_launch,
    forward_launches,
)
from meshplan.kernels.launch import Launch, Machine
from meshplan.ops.attention.block import Span

DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
SPANS = {
    "full": Span(0, 0),
    "causal": Span(0, 0, right=0),
    "window": Span(0, 0, left=1023, right=0),
    "documents": Span(0, 0, right=0),
}
BATCH, HEADS, KV_HEADS, LENGTH = 2, 32, 8, 4096


@dataclass(frozen=True)
class Case:
    """Inputs of one kind. `path`: through tensor descriptors (tma), by pointers (ptr), or in float32 (fp32)."""

    d: int
    dv: int
    mask: str
    path: str


@dataclass(frozen=True)
class Row:
    """One compiled kernel, counted in its machine code."""

    kernel: str
    d: str
    mask: str
    path: str
    tile: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    wgmma: int
    bulk_loads: int
    bulk_stores: int
    async_copies: int
    global_loads: str


def cases() -> list[Case]:
    """Every shipped configuration; by pointers and in float32 not with every mask."""
    masks = [*((mask, "tma") for mask in SPANS), ("causal", "ptr"), ("documents", "ptr"), ("causal", "fp32")]
    return [Case(*dims, *kind) for kind, dims in product(masks, DIMS)]


def launches(case: Case) -> Iterator[tuple[str, Launch]]:
    """What `case` runs, forward and backward, by name; tensors without storage, rows before heads."""
    dtype = torch.float32 if case.path == "fp32" else torch.bfloat16

    def empty(heads: int, width: int) -> torch.Tensor:
        return torch.empty(BATCH, LENGTH, heads, width, dtype=dtype, device="meta").transpose(1, 2)

    q, k, v, dout = empty(HEADS, case.d), empty(KV_HEADS, case.d), empty(KV_HEADS, case.dv), empty(HEADS, case.dv)
    state = new_state(q, v)
    sums = [torch.empty(x.shape, device="meta") for x in (q, k, v)]
    ids = torch.empty(BATCH, LENGTH, dtype=torch.int32, device="meta")
    docs = Docs(ids, ids) if case.mask == "documents" else None
    machine = Machine(hopper=case.path != "ptr", tf32x3=True)
    span, scale = SPANS[case.mask], case.d**-0.5
    for launch in forward_launches(q, k, v, span, scale, state, docs, machine):
        if launch.kernel is forward_kernel:
            yield "forward", launch
    for launch in backward_launches(q, k, v, dout, state.m, state.m, span, scale, *sums, docs, machine):
        if launch.kernel is dkdv_kernel:
            yield ("dk" if launch.arguments["DK"] else "") + ("dv" if launch.arguments["DV"] else ""), launch
        if launch.kernel is dq_kernel:
            yield "dq", launch


def small_launches() -> Iterator[tuple[str, Launch]]:
    """The kernels around: of no head dim's own."""
    x = torch.empty(BATCH, LENGTH, HEADS, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    state = new_state(x, x)
    ids = torch.empty(BATCH, LENGTH, dtype=torch.int32, device="meta")
    yield "finish", finish_launch(state, x, state.m, torch.empty(HEADS, device="meta"))
    yield "delta", delta_launch(x, x, state.m)
    (limits, *_) = forward_launches(x, x, x, Span(0, 0), 1.0, state, Docs(ids, ids), Machine(hopper=True))
    yield "document limits", limits
    flags, table = torch.empty(8, dtype=torch.int32, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    arguments = {
        **dict.fromkeys(("out", "ready", "finished"), flags),
        **dict.fromkeys(("windows", "taken_at"), table),
        **dict.fromkeys(("source", "rank", "epoch"), 3),
        "offset": 1 << 20,
        "words": 1 << 20,
        "BLOCK": peer_ring._BLOCK,
    }
    yield "pull from a peer", Launch(peer_ring.pull_kernel, peer_ring._PROGRAMS, arguments, 4, 3)


def row_of(name: str, launch: Launch, case: Case | None = None) -> Row:
    """Compile one launch and count."""
    get = launch.arguments.get
    counts = asdict(compiled(launch))
    del counts["global_stores"]
    return Row(
        name,
        "" if case is None else f"{case.d}" if case.d == case.dv else f"{case.d}/{case.dv}",
        "" if case is None else case.mask,
        "" if case is None else case.path,
        f"{get('BM')} x {get('BN')}" if "BM" in launch.arguments else str(get("R") or get("T") or get("BLOCK")),
        launch.warps,
        launch.stages,
        **counts,
    )


def rows_of(case: Case | None) -> list[Row]:
    if case is None:
        return [row_of(name, launch) for name, launch in small_launches()]
    return [row_of(name, launch, case) for name, launch in launches(case)]


def wrong(row: Row) -> list[str]:
    """What a shipped configuration must not be."""
    found = []
    if row.spills and row.path != "fp32":
        found.append(f"spills registers {row.spills} times")
    if row.shared >= SHARED:
        found.append(f"takes {row.shared} bytes of shared memory")
    if row.path == "tma" and not (row.wgmma and row.bulk_loads):
        found.append("does not use wgmma and bulk loads")
    return found


def roofline() -> list[dict[str, Any]]:
    """FLOPs and bytes of one pair of blocks, each tensor read or written once, and what they take at the machine's limits."""
    rows = []
    tokens = BATCH * LENGTH
    for (d, dv), mask in product(DIMS, ("full", "causal")):
        pairs = BATCH * HEADS * LENGTH * (LENGTH if mask == "full" else (LENGTH + 1) / 2)
        inputs = 2 * tokens * (HEADS * d + KV_HEADS * (d + dv))
        forward = inputs + 2 * 4 * tokens * HEADS * (dv + 2)
        split = d + dv > 320
        # Each kernel reads q, k, v, dout, lse and delta, and reads and writes the sums that it owns.
        reads = inputs + 2 * tokens * HEADS * dv + 8 * tokens * HEADS
        backward = (3 if split else 2) * reads + 8 * tokens * (HEADS * d + KV_HEADS * (d + dv))
        # dq: s, ds, dq. dk and dv together: s, dv, ds, dk; apart s is computed in both.
        products = {"forward": d + dv, "backward": (2 * d + dv) + (3 * d + 2 * dv if split else 2 * d + 2 * dv)}
        for name, moved in (("forward", forward), ("backward", backward)):
            flops = 2 * pairs * products[name]
            rows.append(
                {
                    "d": f"{d}" if d == dv else f"{d}/{dv}",
                    "mask": mask,
                    "pass": name,
                    "gflop": flops / 1e9,
                    "mb": moved / 1e6,
                    "tensor_us": flops / TENSOR * 1e6,
                    "memory_us": moved / MEMORY * 1e6,
                }
            )
    return rows


_PROSE = f"""
Compiled for sm_90 by Triton {triton.__version__} and its ptxas: nothing here ran on a GPU. Batch {BATCH},
{HEADS} heads on {KV_HEADS} key heads, {LENGTH} queries and keys, rows before heads. *tile* is queries x keys.
*spills* are LDL and STL in the machine code, *wgmma* HGMMA, *bulk loads* and *stores* UTMALDG and UTMASTG, *async
copies* LDGSTS; *global loads* are those of the PTX, by width. *path* `tma` is what Hopper runs; `ptr` serves tensors
that do not begin or step by 16 bytes, and other GPUs; `fp32` are float32 inputs, with three products of tf32 for one:
right, and slow, as the spills say. float16 compiles as bfloat16 does. The script fails where `tma` or `ptr` spills or
takes {SHARED:,} bytes of shared memory, or `tma` is without wgmma or bulk loads.
`python -m benchmarks.attention_compile --page docs/attention_kernels.md` writes this.
"""

_ROOF = f"""
What one call on these sizes multiplies and moves, each tensor read or written once and the float32 sums in and out, and
how long that takes at {TENSOR / 1e12:.0f} TFLOP/s and at {MEMORY / 1e12:.1f} TB/s: worked out, not measured.
Backward makes 7 products where 5 would do, 8 where dk and dv are apart: the price of no atomics.
"""


def chosen(words: set[str]) -> list[Case | None]:
    """Cases that have all the words; the small kernels too where there are none."""
    found: list[Case | None] = [case for case in cases() if words <= {str(case.d), case.mask, case.path}]
    return found if words else [*found, None]


SCRIPT = Script(
    about=__doc__ or "",
    only="head dim/mask/path, each or none of them: 256/causal/tma",
    chosen=chosen,
    rows_of=rows_of,
    name=lambda row: f"{row.kernel} {row.d} {row.mask} {row.path}",
    wrong=wrong,
    limits=roofline,
    compiled_prose=_PROSE,
    limits_prose=_ROOF,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
