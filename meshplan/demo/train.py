"""The training loop of the demo, once for the single device and once for a rank; the two differ in three calls."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.demo.cases import BATCH, SEQ_LEN, Case
from meshplan.models.registry import resolve_model
from meshplan.verify.job import Batch, find_loss

LEARNING_RATE = 1e-3
MAX_NORM = 1.0
WARM_UP = 3
"""First steps whose times are not counted: allocators and connections warm up in them."""


@dataclass(frozen=True)
class Trained:
    """What a run leaves behind: the loss of each step (float32), and the wall clock in seconds as each step ended."""

    losses: tuple[float, ...]
    ended: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Measured: tokens of a global batch by the median step time, the first `WARM_UP` steps left out."""
        return BATCH * SEQ_LEN / median(b - a for a, b in pairwise(self.ended[WARM_UP - 1 :]))


def train_alone(case: Case, steps: int, seed: int, progress: Path) -> Trained:
    """Train the single-device program in this process."""
    model = _built(case, seed)
    return _loop(case, steps, seed, progress, model, lambda batch: batch, nn.utils.clip_grad_norm_)


def train_on_rank(case: Case, steps: int, seed: int, progress: Path) -> Trained:
    """Train this rank's part of the program, within a process group; the first rank reports the progress.

    The losses' mean over ranks is the global loss.
    """
    mp: Any = importlib.import_module("meshplan")
    model = mp.parallelize(_built(case, seed), case.plan, seed=seed)
    reported = progress if dist.get_rank() == 0 else None
    return _loop(case, steps, seed, reported, model, lambda batch: mp.shard_batch(model, batch), mp.clip_grad_norm_)


def _built(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return resolve_model(case.model)()


def _loop(
    case: Case,
    steps: int,
    seed: int,
    progress: Path | None,
    model: nn.Module,
    shard: Callable[[Batch], Batch],
    clip: Callable[..., Any],
) -> Trained:
    # foreach steps refuse parameters on different meshes: norms lie on dp_shard, projections on dp_shard x tp.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses, ended = [], []
    for batch in case.batches(steps, seed):
        local = shard(batch)
        optimizer.zero_grad()
        loss = find_loss(model(**local), local)
        loss.backward()
        clip(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
        ended.append(time.perf_counter())
        if progress is not None:
            with progress.open("a", encoding="utf-8") as out:
                out.write(f"{losses[-1]:.6f}\n")
    return Trained(tuple(losses), tuple(ended))
