"""Where the batch is: which inputs data axes split on dim 0, and which dim of every value follows from that."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from meshplan.compiler.kinds import Kind, N, replicated
from meshplan.compiler.strategies import Chooser
from meshplan.plan.placements import Shard
from meshplan.search.program import Program


def batch_inputs(inputs: Mapping[str, Tensor]) -> set[str]:
    """The inputs that have the batch as dim 0: the first tensor input has it, and every other whose dim 0
    is as long. Nothing is batched where that length is 1."""
    sizes = {key: t.shape[0] for key, t in inputs.items() if t.dim() > 0}
    batch = next(iter(sizes.values()), 1)
    return {key for key, n in sizes.items() if n == batch and n > 1}


def batch_dims(program: Program, chooser: Chooser, batched: Collection[str], degree: int) -> dict[int, int]:
    """By value: the dim that `degree` data ranks split when `batched` inputs are split on dim 0. Values that data ranks have
    whole, or as partial sums, are left out. Runs the rules over the trace without moving anything that has no need to be."""
    kinds: dict[int, Kind] = {}
    for v, value in enumerate(program.values):
        if value.made is None:
            kinds[v] = Shard(0) if value.input in batched else N
    for node in program.nodes:
        have = [kinds.get(v, N) for v in node.ins]
        outs: list[Kind] = [N] * len(node.outs)
        if not all(map(replicated, have)):
            params = [bool(program.values[v].params) for v in node.ins]
            requires = [program.values[v].grad for v in node.ins]
            choice = chooser.choose(node.call, have, params, degree, requires)
            if choice is not None:
                outs = list(choice.outs)
        for v, kind in zip(node.outs, outs, strict=True):
            kinds[v] = kind
    made = {value.made: kinds[v] for v, value in enumerate(program.values) if value.made is not None and v in kinds}
    for v, value in enumerate(program.values):
        if v not in kinds and value.made is not None:
            kinds[v] = made.get(value.made, N)
    return {v: kind.dim for v, kind in kinds.items() if isinstance(kind, Shard)}
