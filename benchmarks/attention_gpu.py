"""How fast are the attention kernels on one GPU, and are they right there? Beside torch's own attention and a matmul.

python -m benchmarks.attention_gpu                                    # some minutes; says so where there is no GPU
python -m benchmarks.attention_gpu --page docs/attention_kernels.md   # and writes the table into the page

Correctness comes first: if a kernel is wrong nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import attention_peers
from benchmarks.gpu import GpuScript, matmul_ceiling, milliseconds, name_of
from benchmarks.kernel_table import table
from meshplan.kernels.attention import block
from meshplan.ops.attention import block as plain
from meshplan.ops.attention.block import Span, State

RANKS = 4
"""Logical ranks of the ring, on one device."""
TOKENS, WIDTH = 32_768, 2_048
"""Batch x length and heads x head dim of what is timed."""
LENGTHS = [2_048, 4_096, 8_192, 16_384, 32_768]
CHECKED = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
SPANS = {
    "full": Span(0, 0),
    "causal": Span(0, 0, right=0),
    "window": Span(0, 0, left=200, right=0),
    "keys after": Span(0, 7, right=0),
    "documents": Span(0, 0, right=0),
}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""Of the largest value. Probabilities and inputs' products are rounded to the inputs' dtype once; nothing else is."""


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Outcome(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Part(NamedTuple):
    """Queries and keys of a rank's shards, by row, that meet in one call."""

    queries: slice
    keys: slice
    span: Span


def inputs(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: str
) -> Inputs:
    """Random, rows before heads as a projection leaves them."""
    draw = torch.Generator(device).manual_seed(0)

    def one(h: int, length: int, d: int) -> Tensor:
        return torch.randn(batch, length, h, d, generator=draw, device=device, dtype=dtype).transpose(1, 2)

    return Inputs(
        one(heads[0], lengths[0], dims[0]),
        one(heads[1], lengths[1], dims[0]),
        one(heads[1], lengths[1], dims[1]),
        one(heads[0], lengths[0], dims[1]),
    )


def once(
    given: Inputs,
    span: Span,
    docs: tuple[Tensor | None, Tensor | None] = (None, None),
    by: Any = block,
    dtype: Any = None,
) -> Outcome:
    """Forward and backward in one block, by the kernels or by plain torch."""
    q, k, v, dout = given
    scale = q.shape[-1] ** -0.5
    state = by.new_state(q, v)
    by.forward(q, k, v, span, scale, state, *docs)
    out, lse = by.finish(state, dtype or q.dtype)
    sums = [torch.zeros(x.shape, dtype=state.acc.dtype, device=x.device) for x in (q, k, v)]
    by.backward(q, k, v, dout, lse, by.delta(out, dout), span, scale, *sums, *docs)
    return Outcome(out, lse, *sums)


def zigzag(rank: int, source: int, chunk: int, causal: bool) -> list[Part]:
    """What queries of `rank` see of the keys of `source`, where rank r holds chunks r and 2n - 1 - r of the sequence."""
    early, late, both = slice(0, chunk), slice(chunk, 2 * chunk), slice(0, 2 * chunk)
    everything = Span(0, 0)
    if not causal:
        return [Part(both, both, everything)]
    if source == rank:
        own = Span(0, 0, right=0)
        return [Part(early, early, own), Part(late, early, everything), Part(late, late, own)]
    return [Part(both, early, everything)] if source < rank else [Part(late, both, everything)]


def shards(x: Tensor, ranks: int) -> list[Tensor]:
    """Rows of each rank in zigzag order, each in memory of its own."""
    chunks = x.chunk(2 * ranks, 2)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]], 2) for r in range(ranks)]


def gathered(parts: list[Tensor]) -> Tensor:
    """The sequence in order again."""
    halves = [x.chunk(2, 2) for x in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], 2)


def ring_forward(given: list[Inputs], causal: bool) -> list[tuple[Tensor, Tensor]]:
    """out and lse of every logical rank: hop by hop, the state carried in float32."""
    ranks, chunk = len(given), given[0].q.shape[2] // 2
    found = []
    for rank, (q, _, v, _) in enumerate(given):
        state = block.new_state(q, v)
        for hop in range(ranks):
            _, k, v, _ = given[source := (rank - hop) % ranks]
            for rows, keys, span in zigzag(rank, source, chunk, causal):
                part = State(*(x[:, :, rows] for x in state))
                block.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], span, q.shape[-1] ** -0.5, part)
        found.append(block.finish(state, q.dtype))
    return found


def ring_backward(given: list[Inputs], results: list[tuple[Tensor, Tensor]], causal: bool) -> list[list[Tensor]]:
    """dq, dk and dv of every logical rank, in float32."""
    ranks, chunk = len(given), given[0].q.shape[2] // 2
    grads = [[torch.zeros(x.shape, device=x.device) for x in one[:3]] for one in given]
    for rank, ((q, _, _, dout), (out, lse)) in enumerate(zip(given, results, strict=True)):
        delta = block.delta(out, dout)
        for hop in range(ranks):
            _, k, v, _ = given[source := (rank - hop) % ranks]
            for rows, keys, span in zigzag(rank, source, chunk, causal):
                facts = (x[:, :, rows] for x in (dout, lse, delta))
                sums = grads[rank][0][:, :, rows], grads[source][1][:, :, keys], grads[source][2][:, :, keys]
                block.backward(q[:, :, rows], k[:, :, keys], v[:, :, keys], *facts, span, q.shape[-1] ** -0.5, *sums)
    return grads


def errors(got: Outcome, want: Outcome) -> float:
    """The largest difference in units of the largest value, of all gradients where one may be zero; inf for nan."""
    largest = max(float(x.abs().max()) for x in want[2:])
    worst = 0.0
    for name, mine, theirs in zip(Outcome._fields, got, want, strict=True):
        mine, theirs = mine.double(), theirs.double()
        apart = (mine - theirs).masked_fill(mine == theirs, 0.0).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        unit = largest if name.startswith("d") else float(theirs.masked_fill(theirs.isinf(), 0.0).abs().max())
        worst = max(worst, float(apart.max()) / (unit or 1.0))
    return worst


def checks(
    device: str,
    lengths: tuple[int, int] = (1000, 777),
    dims: Any = None,
    dtypes: Any = tuple(TOLERANCE),
    heads: tuple[int, int] = (6, 2),
) -> Iterator[dict[str, Any]]:
    """Every head dim, mask and dtype against float64 in plain torch; twice for equal bits; and the ring."""
    for dtype, (d, dv), (mask, span) in product(dtypes, dims or CHECKED, SPANS.items()):
        given = inputs(2, heads, lengths, (d, dv), dtype, device)
        docs: tuple[Tensor | None, Tensor | None] = (None, None)
        if mask == "documents":
            cut = torch.arange(max(lengths), device=device, dtype=torch.int32)
            ids = torch.where(cut < 9 * lengths[1] // 10, cut * 5 // lengths[1], -1).expand(2, -1)
            docs = ids[:, : lengths[0]], ids[:, : lengths[1]]
        got, again = once(given, span, docs), once(given, span, docs)
        want = once(Inputs(*(x.double() for x in given)), span, docs, plain)
        same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        name = f"{d}" if d == dv else f"{d}/{dv}"
        error = errors(got, want)
        yield {"d": name, "dtype": name_of(dtype), "mask": mask, "error": error, "equal bits": same,
               "right": error <= TOLERANCE[dtype] and same}  # fmt: skip
    for dtype, causal in product(dtypes, (False, True)):
        size = max(16, lengths[0] // 8 * 8)
        d = (dims or [(128, 128)])[0]
        given = inputs(1, heads, (size, size), d, dtype, device)
        split = [Inputs(*parts) for parts in zip(*(shards(x, RANKS) for x in given), strict=True)]
        want = once(Inputs(*(x.double() for x in given)), Span(0, 0, right=0 if causal else None), by=plain)
        results = ring_forward(split, causal)
        grads = ring_backward(split, results, causal)
        passed = [(*result, *grad) for result, grad in zip(results, grads, strict=True)]
        pulled = attention_peers.attention(split, block, partial(zigzag, chunk=size // RANKS // 2, causal=causal))
        for name, found in (("ring", passed), ("ring of peers", list(pulled))):
            error = errors(Outcome(*(gathered(list(x)) for x in zip(*found, strict=True))), want)
            yield {"d": f"{d[0]}", "dtype": name_of(dtype), "mask": f"{name}, {RANKS} ranks, {'causal' if causal else 'full'}",
                   "error": error, "equal bits": True, "right": error <= TOLERANCE[dtype]}  # fmt: skip


def timed(d: int, length: int, causal: bool) -> dict[str, Any]:
    """TFLOP/s of one size: 4 S^2 D multiplications and additions a head forward, half of it if causal, 2.5 x backward."""
    batch, heads = TOKENS // length, WIDTH // d
    given = inputs(batch, (heads, heads), (length, length), (d, d), torch.bfloat16, "cuda")
    flops = 4 * batch * heads * length * length * d * (0.5 if causal else 1.0)
    span, scale = Span(0, 0, right=0 if causal else None), d**-0.5
    q, k, v, dout = given

    def forward() -> tuple[Tensor, Tensor]:
        state = block.new_state(q, v)
        block.forward(q, k, v, span, scale, state)
        return block.finish(state, q.dtype)

    out, lse = forward()

    def backward() -> None:
        sums = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
        block.backward(q, k, v, dout, lse, block.delta(out, dout), span, scale, *sums)

    split = [Inputs(*parts) for parts in zip(*(shards(x, RANKS) for x in given), strict=True)]
    results = ring_forward(split, causal)
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "meshplan": (forward, backward),
        f"ring of {RANKS}": (lambda: ring_forward(split, causal), lambda: ring_backward(split, results, causal)),
    }
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        runs[name] = _torch(given, causal, backend)
    row: dict[str, Any] = {"d": str(d), "mask": "causal" if causal else "full", "length": length}
    for at, phase in enumerate(("forward", "backward")):
        for name, pair in runs.items():
            try:
                row[f"{name} {phase}"] = flops * (1.0, 2.5)[at] / milliseconds(pair[at]) / 1e9
            except RuntimeError as error:  # a backend that does not take these inputs
                row[f"{name} {phase}"] = f"refused: {str(error).splitlines()[0][:40]}"
    return row


def _torch(given: Inputs, causal: bool, backend: SDPBackend) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    kept: list[Tensor] = []

    def backward() -> Any:
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], (q, k, v), given.dout, retain_graph=True)

    return forward, backward


def page(facts: str, rows: list[dict[str, Any]] | None, checked: int = 0) -> str:
    """The section of the page."""
    how = (
        "`python -m benchmarks.attention_gpu --page docs/attention_kernels.md` on a machine with one GPU first compares every\n"
        "head dim, mask and dtype with float64, and the ring, also through peers' windows, then times forward and backward in\n"
        "bfloat16 beside cuDNN's and flash attention in torch and a plain matmul: "
        f"{TOKENS:,} tokens, {WIDTH:,} wide. *Ring of {RANKS}* is the work of\n"
        f"{RANKS} ranks in zigzag order on the one device, hop by hop, without any transfer. TFLOP/s count 2 products forward\n"
        "and 5 backward."
    )
    if rows is None:
        return f"{how}\n\n**Not measured**: {facts}"
    return f"{how}\n\nMeasured on {facts}; {checked} checks right.\n\n{table(rows)}"


def facts() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, matmul of 8192 x 8192 {matmul_ceiling():.0f} TFLOP/s"


def everything() -> list[dict[str, Any]]:
    return [timed(d, length, causal) for d, causal, length in product((64, 128), (False, True), LENGTHS)]


SCRIPT = GpuScript(about=__doc__ or "", checks=lambda: checks("cuda"), facts=facts, timed=everything, page=page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
