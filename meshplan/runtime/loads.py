"""What a router did in the steps of a block: choices of every experts module of a lowered model, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.ops.experts.balance import add_choices
from meshplan.ops.experts.load import Load, load_table
from meshplan.runtime.comm import AxisGroup


@dataclass
class _Seen:
    """Choices on this rank of one module so far, how many ranks share its experts, and how many count each token."""

    counts: Tensor
    ranks: int
    times: int


class Loads(Mapping[str, Load]):
    """`Load` by experts module, in the order in which they ran; filled when the block of `expert_load` ends. `print` shows a
    line for each module, its items show their experts."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._loads: dict[str, Load] = {}

    def __getitem__(self, path: str) -> Load:
        return self._loads[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    def __str__(self) -> str:
        width = max([6, *map(len, self)])
        lines = [
            "choices of experts, counted; busiest over the mean",
            f"{'module':<{width}} {'choices':>10} {'ranks':>6} {'rank':>6} {'expert':>7} {'idle':>5}",
        ]
        for path, load in self.items():
            lines.append(
                f"{path:<{width}} {sum(load.experts):>10} {load.ranks:>6} {load.imbalance:>6.2f} {load.expert_imbalance:>7.2f} "
                f"{len(load.idle):>5}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """By module: `experts` (choices of each), `ranks`, `by_rank`, `imbalance`, `expert_imbalance`, `idle`."""
        return {
            path: {
                "experts": list(load.experts), "ranks": load.ranks, "by_rank": list(load.by_rank), "imbalance": load.imbalance,
                "expert_imbalance": load.expert_imbalance, "idle": list(load.idle),
            }
            for path, load in self.items()
        }  # fmt: skip

    def _sum(self) -> None:
        """Add up what all ranks saw: one all_reduce of integers."""
        if not self._seen:
            return
        total = torch.cat([seen.counts for seen in self._seen.values()])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        for (path, seen), counts in zip(
            self._seen.items(), total.split([len(s.counts) for s in self._seen.values()]), strict=True
        ):
            self._loads[path] = load_table(counts // seen.times, seen.ranks)


_open: list[Loads] = []


@contextmanager
def expert_load() -> Iterator[Loads]:
    """Count the choices of all routers of lowered models in the steps inside: those of every forward, once, also where it is
    recomputed in backward. Every rank enters and leaves it alike; leaving sends one all_reduce over all ranks, which waits for
    the device, and steps inside send nothing more.

    Example:
        with mp.expert_load() as load:
            model(**batch).loss.backward()
        print(load)                          # a line a module
        print(load["layers.3.moe.experts"])  # each expert and rank
    """
    loads = Loads()
    _open.append(loads)
    try:
        yield loads
    finally:
        _open.remove(loads)
    loads._sum()


def observe(path: str, indices: Tensor, experts: int, group: AxisGroup, etp: AxisGroup | None = None) -> None:
    """Count the choices that this rank is about to send, if anybody asked.

    Arguments:
        indices: integers [T, k] of the tokens that it dispatches.
        group: the ranks of ep; etp: those that dispatch the same tokens to their parts of the experts.
    """
    for loads in _open:
        seen = loads._seen.get(path)
        if seen is None:
            counts = torch.zeros(experts, dtype=torch.int64, device=indices.device)
            seen = loads._seen[path] = _Seen(counts, group.size, etp.size if etp is not None else 1)
        add_choices(seen.counts, indices)
