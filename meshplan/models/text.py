"""A byte-level text data set that every machine already has: the sources of Python's own standard library."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from meshplan.errors import PlanError

# Not text of the library itself: third-party packages, caches, and tests (many hold deliberately broken bytes).
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


@functools.lru_cache(maxsize=4)
def stdlib_bytes(limit: int = 1 << 20) -> Tensor:
    """The first `limit` bytes of the standard library's sources, files in sorted path order.

    The same interpreter version gives the same bytes on every machine; another version gives other bytes.

    Returns:
        uint8 `[min(limit, all there is)]`. Do not write into it: calls share it.

    Raises:
        PlanError: `no-text` if the interpreter came without its sources.
    """
    data = bytearray()
    for path in _sources(Path(sysconfig.get_paths()["stdlib"])):
        if len(data) >= limit:
            break
        data += path.read_bytes()
    if not data:
        raise PlanError(
            "this Python has no standard library sources to read",
            code="no-text",
            legal="an interpreter whose standard library is .py files, or your own data",
        )
    return torch.frombuffer(data[:limit], dtype=torch.uint8)


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)


def batches(
    seq_len: int,
    batch: int,
    steps: int,
    seed: int = 0,
    *,
    split: Literal["train", "valid"] = "train",
    limit: int = 1 << 20,
) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text, the same ones for the same arguments.

    Arguments:
        seq_len: bytes in a window. A label is the byte after its token.
        batch, steps: windows in one batch, and batches.
        seed: of the windows' positions; draws from a generator of its own.
        split: `valid` is the last tenth of the bytes, `train` the rest; no window touches both.
        limit: bytes of text in use.

    Yields:
        `{"tokens": int64 [batch, seq_len], "labels": int64 [batch, seq_len]}`, values in 0..255.

    Raises:
        PlanError: `text-too-short` if the split holds no whole window, `bad-split` for another split.
    """
    text = stdlib_bytes(limit)
    cut = len(text) * 9 // 10
    parts = {"train": text[:cut], "valid": text[cut:]}
    if split not in parts:
        raise PlanError(f"there is no split {split!r}", code="bad-split", legal=list(parts))
    part = parts[split]
    if len(part) < seq_len + 1:
        raise PlanError(
            f"the {split} split has {len(part)} bytes, a window needs {seq_len + 1}",
            code="text-too-short",
            legal=f"seq_len below {len(part)}, or a larger limit",
        )
    return _windows(part, seq_len, batch, steps, torch.Generator().manual_seed(seed))


def _windows(
    text: Tensor, seq_len: int, batch: int, steps: int, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    offsets = torch.arange(seq_len + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - seq_len, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}
