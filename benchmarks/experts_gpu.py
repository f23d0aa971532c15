"""How fast are the expert kernels on one GPU, and are they right there? Beside torch's matmuls and a plain copy.

python -m benchmarks.experts_gpu                                 # some minutes; says so where there is no GPU
python -m benchmarks.experts_gpu --page docs/expert_kernels.md   # and writes the table into the page

Correctness comes first: if a kernel is wrong nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experts_compile import MODELS, TOKENS, Model
from benchmarks.gpu import GpuScript, copy_ceiling, matmul_ceiling, milliseconds, name_of
from benchmarks.kernel_table import table
from meshplan.kernels.experts import exchange, gather, grouped, sort
from meshplan.kernels.experts.deal import Tables, agree, release
from meshplan.kernels.experts.fused import Mlp, fused_experts
from meshplan.kernels.experts.grouped import Packed
from meshplan.kernels.experts.launch import Groups, Pair
from meshplan.kernels.experts.matmul import UNIT, UNIT_GRADIENTS
from meshplan.kernels.experts.numbers import machine_of
from meshplan.kernels.experts.window import Sizes, Window, logical
from meshplan.ops.experts import grouped as plain
from meshplan.ops.experts import routing
from meshplan.ops.experts.routing import Pairs

RANKS = 8
"""Over which a model's experts are spread; the matmuls that are timed are one rank's."""
LOGICAL = 4
"""Ranks that share the one device where dispatch and combine are timed."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""Of the largest value. Gate and up, the unit, and each result are rounded once."""
LAYOUTS = [Pair(), Pair(interleaved=True), Pair(interleaved=True, clamped=True)]


@dataclass(frozen=True)
class Scale:
    """Sizes of what is checked: tokens of each rank, choices, experts, widths."""

    tokens: tuple[int, ...] = (500, 0, 1, 777)
    k: int = 4
    experts: int = 16
    hidden: int = 264
    width: int = 200


def routing_of(tokens: int, k: int, experts: int, device: str, skew: bool) -> Tensor:
    """int64 [T, k], k experts of each token; with `skew` most choose the first ones, the last is idle, some choices have none."""
    draw = torch.Generator(device).manual_seed(tokens + k)
    scores = torch.rand(tokens, experts, generator=draw, device=device)
    if skew:
        scores -= 2 * torch.arange(experts, device=device) / experts
        scores[:, -1] = -9
    chosen = scores.topk(k, 1).indices
    return torch.where(torch.rand(chosen.shape, generator=draw, device=device) < 0.1, -1, chosen) if skew else chosen


def parameters(e: int, h: int, f: int, turned: bool, dtype: torch.dtype, device: str) -> list[Tensor]:
    """up, down and their biases."""
    draw = torch.Generator(device).manual_seed(e)
    shapes = [(e, h, 2 * f), (e, f, h)] if turned else [(e, 2 * f, h), (e, h, f)]
    scales = [h**-0.5, f**-0.5, 1.0, 1.0]
    return [
        (torch.randn(shape, generator=draw, device=device) * scale).to(dtype)
        for shape, scale in zip([*shapes, (e, 2 * f), (e, h)], scales, strict=True)
    ]


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest difference in units of the largest value of each tensor; inf for nan."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        if theirs.numel():
            apart = (mine.double() - theirs.double()).abs().nan_to_num(nan=float("inf"))
            worst = max(worst, float(apart.max()) / (float(theirs.abs().max()) or 1.0))
    return worst


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients, detached."""
    found = torch.autograd.grad(list(outputs), list(leaves), list(grads))
    return [*(x.detach() for x in outputs), *found]


def checks(device: str, scale: Scale | None = None, dtypes: Any = tuple(TOLERANCE)) -> Iterator[dict[str, Any]]:
    """Sorting bit for bit; permute, combine, matmuls and the MLP, and fused experts on logical ranks, against float64; each twice
    for equal bits."""
    scale = scale or Scale()
    for skew in (False, True):
        keys = routing_of(sum(scale.tokens), scale.k, scale.experts, device, skew)
        slots, counts = routing.sorted_slots(keys, scale.experts)
        found = sort.sort(keys, scale.experts)
        same = torch.equal(found.slots, slots) and torch.equal(found.counts, counts)
        yield {"kernel": "sort", "dtype": "int64", "case": _skew(skew), "error": 0.0, "equal bits": same, "right": same}
        for dtype in dtypes:
            pairs = routing.pairs_of(slots, int(counts.sum()), scale.k)
            yield _compared(
                "permute, combine", dtype, _skew(skew), lambda x, by, p=pairs: _moved(x, by, p, scale), device
            )
    for dtype, turned, pair in product(dtypes, (False, True), LAYOUTS):
        case = f"{'in, out' if turned else 'out, in'}, {'g u g u' if pair.interleaved else 'g g u u'}"
        case += ", clamped" if pair.clamped else ""

        def run(dtype: torch.dtype, by: Any, turned: bool = turned, pair: Pair = pair) -> list[Tensor]:
            return _experts(dtype, by, turned, pair, scale, device)

        yield _compared("mlp", dtype, case, run, device)
    for dtype, skew, mlp in product(dtypes, (False, True), (True, False)):

        def fused(dtype: torch.dtype, by: Any, skew: bool = skew, mlp: bool = mlp) -> list[Tensor]:
            return _fused(dtype, by, skew, mlp, scale, device)

        kind = "experts on tiles as they arrive" if mlp else "rows first, then experts"
        yield _compared(f"fused, {len(scale.tokens)} logical ranks", dtype, f"{kind}, {_skew(skew)}", fused, device)


def _skew(skew: bool) -> str:
    return "skewed" if skew else "even"


def _compared(
    kernel: str, dtype: torch.dtype, case: str, run: Callable[[torch.dtype, bool], list[Tensor]], device: str
) -> dict[str, Any]:
    """`run(dtype, by the kernels)` twice, and `run(float64, in plain torch)` on the same values."""
    got, again, want = run(dtype, True), run(dtype, True), run(dtype, False)
    same, error = all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), error_of(got, want)
    right = same and error <= TOLERANCE[dtype]
    return {"kernel": kernel, "dtype": name_of(dtype), "case": case, "error": error, "equal bits": same, "right": right}


def _leaves(tensors: Sequence[Tensor], kernels: bool) -> list[Tensor]:
    return [(t if kernels else t.double()).detach().clone().requires_grad_() for t in tensors]


def _random(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(7)
    return [torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes]


def _moved(dtype: torch.dtype, kernels: bool, pairs: Pairs, scale: Scale) -> list[Tensor]:
    m, n, device = pairs.place.shape[0], pairs.rows.shape[0], str(pairs.rows.device)
    by: Any = gather if kernels else routing
    *inputs, g1, g2 = _random([(m, scale.hidden), (n, scale.hidden), (m, scale.k), (n, scale.hidden), (m, scale.hidden)],
                              dtype, device)  # fmt: skip
    x, y, weights = leaves = _leaves(inputs, kernels)
    outputs = [by.expand(x, pairs), by.combine(y, weights, pairs)]
    return gradients(outputs, leaves, [g.to(outputs[0].dtype) for g in (g1, g2)])


def _experts(dtype: torch.dtype, kernels: bool, turned: bool, pair: Pair, scale: Scale, device: str) -> list[Tensor]:
    chosen = routing_of(sum(scale.tokens), scale.k, scale.experts, device, True)
    counts = tuple(routing.sorted_slots(chosen, scale.experts)[1].tolist())
    shape = (sum(counts), scale.hidden)
    x, grad = _random([shape, shape], dtype, device)
    leaves = _leaves([x, *parameters(scale.experts, scale.hidden, scale.width, turned, dtype, device)], kernels)
    y = _mlp(leaves[0], counts, leaves[1:], turned, pair, kernels)
    return gradients([y], leaves, [grad.to(y.dtype)])


def _mlp(
    x: Tensor, counts: tuple[int, ...], params: Sequence[Tensor], turned: bool, pair: Pair, kernels: bool
) -> Tensor:
    up, down, up_bias, down_bias = params
    if kernels:
        return grouped.grouped_mlp(x, counts, Packed(up, down, up_bias, down_bias, pair, turned))
    unit = plain.clamped_swiglu if pair.clamped else "silu"
    return plain.grouped_mlp(
        x, counts, up, down, up_bias, down_bias, activation=unit, interleaved=pair.interleaved, turned=turned
    )


def _fused(dtype: torch.dtype, kernels: bool, skew: bool, mlp: bool, scale: Scale, device: str) -> list[Tensor]:
    """Fused on logical ranks, or one device that has all tokens and all experts."""
    n, total, h = len(scale.tokens), sum(scale.tokens), scale.hidden
    chosen = routing_of(total, scale.k, scale.experts, device, skew)
    x, grad = _random([(total, h), (total, h)], dtype, device)
    weights = torch.rand(total, scale.k, device=device, generator=torch.Generator(device).manual_seed(8))
    params = parameters(scale.experts, h, scale.width, False, dtype, device)
    x, weights, *params = leaves = _leaves([x, weights, *params], kernels)
    if not kernels:
        slots, counts = routing.sorted_slots(chosen, scale.experts)
        pairs = routing.pairs_of(slots, int(counts.sum()), scale.k)
        y = _mlp(routing.expand(x, pairs), tuple(counts.tolist()), params, False, Pair(), False)
        return gradients([routing.combine(y, weights, pairs)], leaves, [grad.double()])
    sizes = Sizes(ranks=n, experts=scale.experts, tokens=max(scale.tokens), k=scale.k, row_bytes=h * x.element_size(),
                  chunk=4 if device == "cpu" else 32)  # fmt: skip
    own = [list(part) for part in zip(*(p.chunk(n) for p in params), strict=True)]

    def body(p: list[Tensor]) -> Any:
        return Mlp(Packed(*p)) if mlp else lambda rows, counts: _mlp(rows, counts, p, False, Pair(), True)

    parts = [list(t.split(list(scale.tokens))) for t in (x, chosen, weights)]
    out = fused_experts(*parts, [body(p) for p in own], logical(sizes, device))
    return gradients([torch.cat(out)], leaves, [grad])


class _Step:
    """Dispatch and combine of a model on logical ranks, apart from the experts: to be timed."""

    def __init__(self, model: Model, ranks: int) -> None:
        sizes = Sizes(ranks=ranks, experts=model.experts, tokens=TOKENS, k=model.k, row_bytes=2 * model.hidden)
        self.window: Window = logical(sizes, "cuda")
        self.machine = machine_of(self.window.device)
        chosen = [routing_of(TOKENS, model.k, model.experts, "cuda", False) for _ in range(ranks)]
        self.x = [torch.randn(TOKENS, model.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(ranks)]
        self.deal, self.routed = agree(self.window, chosen, 2 * model.hidden)
        self.tables = [Tables.of(self.deal, r, self.window.device) for r in range(ranks)]
        self.moved = 2 * 2 * model.hidden * sum(sum(row) for row in self.deal.rows)
        self.pulled = 2 * model.hidden * (sum(sum(row) for row in self.deal.rows) + ranks * TOKENS)

    def push(self) -> None:
        self.window.pushed += 1
        for r, own in enumerate(self.tables):
            rows = self.routed[r].rows
            exchange.push_launch(self.window, r, self.x[r], rows, own.send, own.sent, self.machine).run()
        release(self.window, "freed", self.window.pushed)

    def pull(self) -> None:
        """From outboxes that were answered once: flags stay raised."""
        for r, own in enumerate(self.tables):
            routed = self.routed[r]
            out, sent = torch.empty_like(self.x[r]), routed.rows.shape[0]
            exchange.pull_launch(self.window, r, out, routed.place, sent, own.homes, self.machine).run()


def moving(name: str, model: Model, copy: float) -> Iterator[dict[str, Any]]:
    """GB/s, read and written, of what moves rows, and its share of a plain copy's."""
    chosen = routing_of(TOKENS, model.k, model.experts, "cuda", False)
    pairs = routing.pairs_of(routing.sorted_slots(chosen, model.experts)[0], TOKENS * model.k, model.k)
    x, y = _random([(TOKENS, model.hidden), (TOKENS * model.k, model.hidden)], torch.bfloat16, "cuda")
    weights = torch.rand(TOKENS, model.k, device="cuda")
    row = 2 * model.hidden
    step = _Step(model, LOGICAL)
    runs: dict[str, tuple[Callable[[], Any], float]] = {
        "permute": (lambda: gather.take(x, pairs.rows), row * 2 * TOKENS * model.k),
        "combine": (lambda: gather.total(y, weights, pairs.place), row * TOKENS * (model.k + 1)),
        "combine backward": (lambda: gather.weigh(y, weights, pairs.place, x), row * TOKENS * (2 * model.k + 1)),
        f"push, {LOGICAL} logical ranks": (step.push, step.moved),
        f"pull, {LOGICAL} logical ranks": (step.pull, step.pulled),
    }
    for part, (run, moved) in runs.items():
        speed = moved / milliseconds(run) / 1e6
        yield {"model": name, "part": part, "speed": speed, "unit": "GB/s", "share": speed / copy, "torch": ""}


def multiplying(name: str, model: Model, dense: float) -> Iterator[dict[str, Any]]:
    """TFLOP/s of one rank's grouped matmuls, their share of a dense matmul's, and of torch's grouped matmul."""
    local, h, f = model.experts // RANKS, model.hidden, model.width
    each = TOKENS * model.k // local
    counts = (each,) * local
    groups = Groups(counts, torch.device("cuda"))
    offsets = groups.starts[1:].contiguous()
    up, down, *_ = parameters(local, h, f, False, torch.bfloat16, "cuda")
    x, dy, unit, pair = _random([(local * each, n) for n in (h, h, f, 2 * f)], torch.bfloat16, "cuda")
    parts: dict[str, tuple[Callable[[], Any], float, Callable[[], Any]]] = {
        "down": (
            lambda: grouped.times(unit, down, False, groups),
            2.0 * f * h,
            lambda: F.grouped_mm(unit, down.transpose(1, 2), offs=offsets),
        ),
        "dx": (
            lambda: grouped.times(pair, up, True, groups),
            4.0 * f * h,
            lambda: F.grouped_mm(pair, up, offs=offsets),
        ),
        "d weight": (
            lambda: grouped.sums(pair, x, groups, up),
            4.0 * f * h,
            lambda: F.grouped_mm(pair.T, x, offs=offsets),
        ),
        "gate, up, unit": (
            lambda: grouped.times(x, up, False, groups, half=True, do=UNIT.value, h=torch.empty_like(pair)),
            4.0 * f * h,
            lambda: _torch_unit(x, up, offsets),
        ),
        "d gate, d up, unit": (
            lambda: grouped.times(dy, down, True, groups, do=UNIT_GRADIENTS.value, h=pair, dh=torch.empty_like(pair)),
            2.0 * f * h,
            lambda: F.grouped_mm(dy, down, offs=offsets),
        ),
    }
    for part, (run, flops, theirs) in parts.items():
        speed = local * each * flops / milliseconds(run) / 1e9
        row = {"model": name, "part": part, "speed": speed, "unit": "TFLOP/s", "share": speed / dense}
        try:
            yield {**row, "torch": f"{local * each * flops / milliseconds(theirs) / 1e9:.1f}"}
        except RuntimeError as error:
            yield {**row, "torch": f"refused: {str(error).splitlines()[0][:40]}"}


def _torch_unit(x: Tensor, up: Tensor, offsets: Tensor) -> Tensor:
    gate, other = F.grouped_mm(x, up.transpose(1, 2), offs=offsets).chunk(2, -1)
    return F.silu(gate) * other


_LIMITS: dict[str, float] = {}


def facts() -> str:
    _LIMITS.update(dense=matmul_ceiling(), copy=copy_ceiling())
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: matmul of 8192 x 8192 {_LIMITS['dense']:.0f} TFLOP/s, copy "
        f"of 1 GiB {_LIMITS['copy']:.0f} GB/s"
    )


def everything() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        rows += moving(name, model, _LIMITS["copy"])
        if not model.pair.interleaved:
            rows += multiplying(name, model, _LIMITS["dense"])
    return rows


def page(facts: str, rows: list[dict[str, Any]] | None, checked: int = 0) -> str:
    """The section of the page."""
    how = (
        "`python -m benchmarks.experts_gpu --page docs/expert_kernels.md` on a machine with one GPU first compares every\n"
        f"kernel, dtype and layout with float64, fused experts on {len(Scale().tokens)} logical ranks among them, and then\n"
        f"times, for {TOKENS:,} tokens in bfloat16: what moves rows, in GB/s read and written, as a share of a plain copy's\n"
        f"(goal 0.85); and one rank's grouped matmuls of {RANKS}, as a share of a dense matmul's (goal 0.8), beside torch's\n"
        "`grouped_mm`, which makes no unit of its own: where the kernel does, torch's time has it as operations behind."
    )
    if rows is None:
        return f"{how}\n\n**Not measured**: {facts}"
    return f"{how}\n\nMeasured on {facts}; {checked} checks right.\n\n{table(rows)}"


SCRIPT = GpuScript(about=__doc__ or "", checks=lambda: checks("cuda"), facts=facts, timed=everything, page=page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
