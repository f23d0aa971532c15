"""Which mesh axis stresses which block of a pattern: parameters and FLOPs counted, bytes and pipeline stages modelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from meshplan.cost.pattern_axes import Parameters, Run, Sent
from meshplan.errors import PlanError
from meshplan.mesh.expert_view import expert_view
from meshplan.mesh.spec import MeshSpec, divisors
from meshplan.models.hybrid import Hybrid, HybridBlock

SAMPLE = 1024
"""Tokens on which FLOPs are counted that do not grow with the sequence: those of all blocks but attention."""


@dataclass(frozen=True, kw_only=True)
class BlockStress:
    """One letter of a pattern.

    Attributes:
        letter, blocks: the letter, and how often it stands in the pattern.
        parameters: of one block, counted; active: those that one token is multiplied with.
        flops: a token, forward, counted: multiply-adds of matrix products as two, causal attention in full.
        sent: by axis of more than one rank, what one rank sends for one block.
    """

    letter: str
    blocks: int
    parameters: int
    active: int
    flops: float
    sent: dict[str, Sent]

    @property
    def most(self) -> str | None:
        """The axis on which a rank sends most for this block; `pp` sends at cuts only and is left out."""
        sent = {axis: s.total for axis, s in self.sent.items() if axis != "pp" and s.total}
        return max(sent, key=lambda axis: sent[axis]) if sent else None


@dataclass(frozen=True, kw_only=True)
class PatternStress:
    """A pattern on a mesh.

    Attributes:
        run: sizes, mesh, batch and dtype.
        blocks: one entry for each letter that occurs, in the order of the pattern.
        stages: the pattern cut into pp contiguous parts so that the busiest has least FLOPs.
        imbalance: FLOPs of the busiest stage over the mean.
    """

    run: Run
    blocks: tuple[BlockStress, ...]
    stages: tuple[str, ...]
    imbalance: float


def pattern_stress(
    factory: Callable[[], torch.nn.Module],
    spec: MeshSpec,
    *,
    ep: int = 1,
    batch: int = 1,
    seq: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
) -> PatternStress:
    """Count and model every kind of block of a model of a pattern.

    Arguments:
        factory: builds a `Hybrid`; it is called on the meta device.
        spec: the dense mesh; ep: ranks of it that share one copy of the experts.
        batch, seq: sequences on each data rank, and tokens of each on all cp ranks together.
        dtype: of parameters and activations.

    Raises:
        PlanError: `bad-model` for a model of no pattern, `expert-fold` for an ep that the mesh has no room for,
            `experts-split` for one that does not divide the experts, `bad-value` for sizes that cannot be cut so.
    """
    view = expert_view(spec, ep)
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, Hybrid):
        raise PlanError(f"a {type(model).__name__} has no pattern", code="bad-model", legal="hybrid:PATTERN")
    c, cp, pp = model.config, spec.degree("cp"), spec.degree("pp")
    if batch < 1 or seq < 1 or seq % cp or pp > len(c.pattern):
        raise PlanError(
            f"{batch} sequences of {seq} tokens and {len(c.pattern)} blocks cannot be cut by cp {cp} and pp {pp}",
            code="bad-value",
            legal="a sequence that cp divides, and at least one block a stage",
        )
    if "E" in c.pattern and c.n_experts % ep:
        raise PlanError(
            f"{c.n_experts} experts cannot be split over {ep} ranks on ep",
            code="experts-split",
            legal="ep: " + ", ".join(map(str, divisors(c.n_experts))),
        )
    run = Run(config=c, view=view, batch=batch, seq=seq, dtype=dtype)
    blocks = tuple(_block(model, letter, run) for letter in dict.fromkeys(c.pattern))
    work = {block.letter: block.flops for block in blocks}
    stages = balanced_stages(c.pattern, work, pp)
    totals = [sum(work[letter] for letter in stage) for stage in stages]
    return PatternStress(run=run, blocks=blocks, stages=stages, imbalance=max(totals) * pp / sum(totals))


def _block(model: Hybrid, letter: str, run: Run) -> BlockStress:
    c = run.config
    block = model.layers[c.pattern.index(letter)]
    assert isinstance(block, HybridBlock)
    total, whole, experts = _numel(block), _numel(block.norm), 0
    if block.moe is not None:
        whole += _numel(block.moe.router)
        experts = _numel(block.moe.experts)
    return BlockStress(
        letter=letter,
        blocks=c.pattern.count(letter),
        parameters=total,
        active=total - experts + experts * c.top_k // c.n_experts,
        flops=block_flops(model, block, run.seq),
        sent=run.sent(letter, Parameters(split=total - whole - experts, whole=whole, experts=experts)),
    )


def block_flops(model: Hybrid, block: HybridBlock, seq: int) -> float:
    """FLOPs a token of one block forward in a sequence of `seq` tokens, counted from its operators on the model's device.

    Experts are given all choices as rows of one of them: which one computes a row does not change the work. Blocks without
    attention are counted on at most `SAMPLE` tokens.
    """
    tokens = seq if block.attention is not None else min(seq, SAMPLE)
    like = model.tok_embeddings.weight
    x = torch.empty(1, tokens, model.config.dim, device=like.device, dtype=like.dtype)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        if block.moe is None:
            block(x, *model.rotary(torch.arange(tokens, device=like.device)))
        else:
            block.moe.router(x[0])
            block.moe.experts.expert(0, x[0].repeat(model.config.top_k, 1))
            if block.moe.shared_experts is not None:
                block.moe.shared_experts(x)
    return counted.get_total_flops() / tokens


def balanced_stages(pattern: str, work: dict[str, float], stages: int) -> tuple[str, ...]:
    """`pattern` cut into contiguous stages, none empty, so that the busiest has least `work`."""
    best: dict[tuple[int, int], tuple[float, tuple[str, ...]]] = {(0, 0): (0.0, ())}
    for count in range(1, stages + 1):
        for end in range(count, len(pattern) + 1):
            options = []
            for start in range(count - 1, end):
                if (count - 1, start) in best:
                    before, cut = best[count - 1, start]
                    options.append((max(before, sum(work[x] for x in pattern[start:end])), (*cut, pattern[start:end])))
            best[count, end] = min(options, key=lambda option: option[0])
    return best[stages, len(pattern)][1]


def _numel(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
