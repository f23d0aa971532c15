"""What the expert kernels become on Hopper: each shipped configuration, compiled for sm_90 without a GPU and counted.

python -m benchmarks.experts_compile                                 # the table; fails where a register is spilled
python -m benchmarks.experts_compile --page docs/expert_kernels.md   # and writes it into the page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.kernel_table import MEMORY, SHARED, TENSOR, Script, compiled
from meshplan.kernels.experts import exchange, gather, sort
from meshplan.kernels.experts.exchange import PROGRAMS
from meshplan.kernels.experts.gather import Flags
from meshplan.kernels.experts.launch import Gather, Groups, Pair, columns_launch, rows_launch, sums_launch
from meshplan.kernels.experts.matmul import UNIT, UNIT_GRADIENTS
from meshplan.kernels.experts.window import Sizes, Window
from meshplan.kernels.launch import Launch, Machine

LINK = 450e9
"""Bytes/s of NVLink 4 each way, all peers of a rank together."""
TOKENS, RANKS = 4096, 8
"""Of a rank, and ranks over which the experts are spread."""
META = torch.device("meta")


class Model(NamedTuple):
    """Widths of rows and of an expert's unit, experts, choices of a token; how gate and up lie; whether there are biases."""

    hidden: int
    width: int
    experts: int
    k: int
    pair: Pair = Pair()
    turned: bool = False
    bias: bool = False


MODELS = {
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8),
    "Mixtral 8x7B": Model(4096, 14336, 8, 2),
    "DeepSeek-V3": Model(7168, 2048, 256, 8),
    "gpt-oss-20b": Model(2880, 2880, 32, 4, Pair(interleaved=True, clamped=True), turned=True, bias=True),
}


@dataclass(frozen=True)
class Case:
    """A model's kernels. `path`: through tensor descriptors (tma; few: where experts have few rows), by pointers (ptr), in
    float32 (fp32), or those that move rows (move)."""

    model: str
    path: str


@dataclass(frozen=True)
class Row:
    """One compiled kernel, counted in its machine code."""

    kernel: str
    model: str
    path: str
    tile: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    wgmma: int
    bulk_loads: int
    async_copies: int
    global_loads: str
    global_stores: str


def cases() -> list[Case]:
    """Every shipped configuration; by pointers and in float32 with one of the models' layouts each."""
    whole = [Case(model, path) for model in MODELS for path in ("tma", "few", "move")]
    return whole + [Case(model, path) for model in ("Qwen3-30B-A3B", "gpt-oss-20b") for path in ("ptr", "fp32")]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def launches(case: Case) -> Iterator[tuple[str, Launch]]:
    """What `case` runs, by name; tensors without storage."""
    yield from moves(MODELS[case.model]) if case.path == "move" else matmuls(MODELS[case.model], case.path)


def matmuls(model: Model, path: str) -> Iterator[tuple[str, Launch]]:
    """The grouped matmuls of one rank's experts, forward and backward."""
    dtype = torch.float32 if path == "fp32" else torch.bfloat16
    machine = Machine(hopper=path != "ptr", tf32x3=True)
    local, h, f = model.experts // RANKS, model.hidden, model.width
    each = 16 if path == "few" else TOKENS * model.k // local
    n, groups = local * each, Groups((each,) * local, META)

    def new(*shape: int) -> Tensor:
        return empty(*shape, dtype=dtype)

    up, down = (new(local, h, 2 * f), new(local, f, h)) if model.turned else (new(local, 2 * f, h), new(local, h, f))
    up_bias, down_bias = (new(local, 2 * f), new(local, h)) if model.bias else (None, None)
    x, dy, unit, pairs = new(n, h), new(n, h), new(n, f), new(n, 2 * f)
    turned, pair = model.turned, model.pair
    made: dict[str, Any] = {"do": UNIT.value, "pair": pair, "h": pairs, "bias": up_bias}
    yield "gate, up, unit", rows_launch(x, up, turned, groups, unit, machine, **made)
    index, flags = empty(n, dtype=torch.int64), empty(n, dtype=torch.int32)
    waiting = Gather(index, flags, 32, 3, PROGRAMS)
    yield "the same as rows arrive", rows_launch(x, up, turned, groups, unit, machine, gather=waiting, **made)
    yield "down", rows_launch(unit, down, turned, groups, dy, machine, bias=down_bias)
    made = {"do": UNIT_GRADIENTS.value, "pair": pair, "h": pairs, "dh": pairs}
    yield "d gate, d up, unit", rows_launch(dy, down, not turned, groups, unit, machine, **made)
    yield "dx", rows_launch(pairs, up, not turned, groups, x, machine)
    left, right = (x, pairs) if turned else (pairs, x)
    yield "d weight", sums_launch(left, right, groups, up, machine)
    if up_bias is not None:
        yield "d bias", columns_launch(pairs, groups, up_bias, machine)


def moves(model: Model) -> Iterator[tuple[str, Launch]]:
    """Sorting, permuting and combining on one rank, and dispatch and combine through peers' memory."""
    machine, t, k, h = Machine(hopper=True), TOKENS, model.k, model.hidden
    indices, weights = empty(t, k, dtype=torch.int64), empty(t, k, dtype=torch.float32)
    names = ("count", "scan", "settle")
    found = sort._empty(indices, model.experts)
    yield from zip(names, sort.sort_launches(indices, model.experts, found, machine), strict=True)
    n = t * k
    rows, slots, place = empty(n, dtype=torch.int64), found.slots, found.place.view(t, k)
    yield "tables", sort.tables_launch(slots, n, k, rows, found.place)
    x, y = empty(t, h), empty(n, h)
    yield "permute", gather.take_launch(x, rows, y, None, machine)
    yield "unpermute", gather.total_launch(y, None, place, x, machine)
    yield "combine", gather.total_launch(y, weights, place, x, machine)
    yield "combine backward", gather.weigh_launch(y, weights, place, x, y, weights, None, machine)

    sizes = Sizes(ranks=RANKS, experts=model.experts, tokens=t, k=k, row_bytes=2 * h)
    window = Window(sizes, {0: empty(sizes.region, dtype=torch.uint8)}, [0] * RANKS)
    runs, homes = empty(5, RANKS, dtype=torch.int32), empty(2, RANKS, dtype=torch.int32)
    owners, sent = empty(t, RANKS, dtype=torch.int32), RANKS * sizes.chunks_sent
    flags = Flags(empty(sizes.chunks, dtype=torch.int32), sizes.chunk, 3)
    numbers, factors = empty(t, k, dtype=torch.int32), empty(t, k, dtype=torch.float32)
    yield "tell counts", exchange.tell_launch(window, 0, empty(sizes.words, dtype=torch.int32))
    yield "owners", exchange.owners_launch(indices, owners, model.experts // RANKS, machine)
    yield "choose", exchange.choose_launch(window, 0, indices, weights, rows, runs, sent)
    yield "push to peers", exchange.push_launch(window, 0, x, rows, runs, sent, machine)
    yield "accept", exchange.accept_launch(window, 0, numbers, factors, runs, sent)
    yield "permute as rows arrive", gather.take_launch(x, rows, y, flags, machine)
    yield "answer", exchange.answer_launch(window, 0, y, weights, place, None, runs, sent, machine)
    yield "answer backward", exchange.answer_launch(window, 0, y, None, place, factors, runs, sent, machine)
    to_ranks = empty(t, RANKS, dtype=torch.int64)
    yield "pull from peers", exchange.pull_launch(window, 0, x, to_ranks, n, homes, machine)
    yield "pull weights", exchange.pull_weights_launch(window, factors, indices, to_ranks, homes)
    yield "combine backward as rows arrive", gather.weigh_launch(y, weights, place, x, y, weights, flags, machine)


def rows_of(case: Case) -> list[Row]:
    found = []
    for name, launch in launches(case):
        counts = asdict(compiled(launch))
        del counts["bulk_stores"]
        found.append(Row(name, case.model, case.path, tile(launch), launch.warps, launch.stages, **counts))
    return found


def tile(launch: Launch) -> str:
    """Rows x columns x depth of a matmul; rows x numbers of what moves rows."""
    get = launch.arguments.get
    sizes = [get("BM"), get("BN"), get("BK")] if get("BM") else [get("R") or get("CHUNK"), get("W")]
    return " x ".join(str(size) for size in sizes if size) if any(sizes) else str(get("B") or "")


WIDE = ("permute", "unpermute", "combine", "push", "pull from", "answer")
"""Beginnings of the names of kernels that move rows, 16 bytes a thread."""


def wrong(row: Row) -> list[str]:
    """What a shipped configuration must not be."""
    found = []
    if row.spills and row.path != "fp32":
        found.append(f"spills registers {row.spills} times")
    if row.shared >= SHARED:
        found.append(f"takes {row.shared} bytes of shared memory")
    matmul = row.path in ("tma", "few") and row.kernel != "d bias"
    if matmul and not (row.wgmma and row.bulk_loads):
        found.append("does not use wgmma and bulk loads")
    if row.path == "move" and row.kernel.startswith(WIDE):
        for what, counted in (("loads", row.global_loads), ("stores", row.global_stores)):
            if not counted.startswith("16 B"):
                found.append(f"{what} rows by {counted}")
    return found


def roofline() -> list[dict[str, Any]]:
    """Multiplications and bytes of one rank's part of a layer, every tensor read or written once, and the least time."""
    rows = []
    for name, m in MODELS.items():
        local, n, h, f = m.experts // RANKS, TOKENS * m.k, m.hidden, m.width
        # Rows that leave a rank: to each of the others once, if one of its experts is among k evenly drawn ones.
        share = RANKS * (1 - (1 - 1 / RANKS) ** m.k)
        away, all_rows = TOKENS * share * (RANKS - 1) / RANKS, TOKENS * share
        up, down = local * 2 * f * h, local * f * h
        parts: list[tuple[str, float, float, float]] = [
            ("dispatch", 0, 2 * 2 * h * all_rows, 2 * h * away),
            ("gate, up, unit", 2 * n * h * 2 * f, 2 * (n * h + up + n * 3 * f), 0),
            ("down", 2 * n * f * h, 2 * (n * f + down + n * h), 0),
            ("combine", 0, 2 * h * (n + 2 * all_rows + TOKENS), 2 * h * away),
            ("d gate, d up, unit", 2 * n * f * h, 2 * (n * h + down + n * 5 * f), 0),
            ("dx", 2 * n * h * 2 * f, 2 * (n * 2 * f + up + n * h), 0),
            ("d weights", 2 * n * h * 3 * f, 2 * (n * 2 * h + n * 3 * f + up + down), 0),
        ]
        for part, flops, moved, sent in parts:
            rows.append(
                {
                    "model": name,
                    "part": part,
                    "gflop": flops / 1e9,
                    "mb": moved / 1e6,
                    "link_mb": sent / 1e6,
                    "tensor_us": flops / TENSOR * 1e6,
                    "memory_us": moved / MEMORY * 1e6,
                    "link_us": sent / LINK * 1e6,
                }
            )
    return rows


_PROSE = f"""
Compiled for sm_90 by Triton {triton.__version__} and its ptxas: nothing here ran on a GPU. Experts spread over {RANKS} ranks,
{TOKENS} tokens each. *tile* is rows x columns x depth of a matmul (columns of the unit; gate and up are twice as many), rows
x numbers of what moves rows. *spills* are LDL and STL in the machine code, *wgmma* HGMMA, *bulk loads* UTMALDG, *async copies*
LDGSTS; *global loads* and *stores* are those of the PTX, by width: stores of `push` go to peers, loads of `pull` come from them.
*path* `tma` is what Hopper runs, `few` where experts have few rows; `ptr` serves tensors that do not begin or step by 16
bytes, and other GPUs; `fp32` are float32 inputs, with three products of tf32 for one: right, and slow. The script fails where
a 16-bit kernel spills or takes {SHARED:,} bytes of shared memory, where a matmul on Hopper is without wgmma or bulk loads,
or rows move in less than 16 bytes. `python -m benchmarks.experts_compile --page docs/expert_kernels.md` writes this.
"""

_ROOF = f"""
What one rank of {RANKS} multiplies, moves and sends for {TOKENS} tokens, evenly routed, each tensor read or written once, in
bfloat16; and how long that takes at {TENSOR / 1e12:.0f} TFLOP/s, at {MEMORY / 1e12:.1f} TB/s, and at {LINK / 1e9:.0f} GB/s of
NVLink each way: worked out, not measured. A token is sent once to a rank, however many of its experts are there.
"""


def chosen(words: set[str]) -> list[Case]:
    """Cases that have all the words."""
    return [case for case in cases() if words <= {case.model, case.path}]


SCRIPT = Script(
    about=__doc__ or "",
    only="model/path, one or both: Mixtral 8x7B/tma",
    chosen=chosen,
    rows_of=rows_of,
    name=lambda row: f"{row.kernel} {row.model} {row.path}",
    wrong=wrong,
    limits=roofline,
    compiled_prose=_PROSE,
    limits_prose=_ROOF,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
