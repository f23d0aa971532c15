"""Dropout whose masks belong to global elements: every sharding drops what one device drops, and a recompute again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.streams import Key, keep_mask, stream_key

Runs = Sequence[tuple[int, int]]
"""Where a shard that is not one block lies on a dim: (first global index, length) of each run, in local order."""


def dropout(
    x: Tensor,
    p: float,
    training: bool,
    *,
    key: Key,
    global_shape: Sequence[int],
    offsets: Sequence[int | Runs],
    inplace: bool = False,
) -> Tensor:
    """`torch.nn.functional.dropout`, with the mask of `x`'s own elements out of the global tensor's mask.

    Communicates nothing. Ranks that hold the same elements draw the same mask, others draw theirs.

    Arguments:
        x: floating tensor, this rank's shard.
        p: probability of dropping an element, in [0, 1].
        key: the stream of this call (`DropoutStreams.key`); an int, or a 0-dim int64 tensor, with which a compiled step
            is not compiled again for each new key.
        global_shape: shape of the whole tensor.
        offsets: for each dim, the first global index that `x` holds, or the runs it holds (zigzag sequence shards).
        inplace: write into `x`.

    Raises:
        PlanError: `bad-dropout` unless p is in [0, 1]; `block-outside` if `x` does not lie in the global tensor.
    """
    if not 0.0 <= p <= 1.0:
        raise PlanError(f"dropout probability {p} is not a probability", code="bad-dropout", legal="0 to 1")
    if not training or p == 0.0:
        return x
    keep = block_mask(key, p, global_shape, offsets, x.shape, x.device)
    # Multiplied in turn, so that autograd keeps the one-byte mask and not a mask of x's dtype.
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return x.mul_(keep).mul_(scale) if inplace else x * keep * scale


def block_mask(
    key: Key,
    p: float,
    global_shape: Sequence[int],
    offsets: Sequence[int | Runs],
    local_shape: Sequence[int],
    device: torch.device | str | None = None,
) -> Tensor:
    """`keep_mask` of a shard that may lie in several runs on a dim: bool, of `local_shape`, True where kept.

    Raises:
        PlanError: `block-outside` if the runs do not add up to the shard or leave the global tensor.
    """
    for dim, where in enumerate(offsets):
        if isinstance(where, int):
            continue
        if sum(length for _, length in where) != local_shape[dim] or not where:
            raise PlanError(
                f"runs {[tuple(run) for run in where]} on dim {dim} do not make up a shard of {local_shape[dim]}",
                code="block-outside",
            )
        blocks = []
        for start, length in where:
            place = [*offsets[:dim], start, *offsets[dim + 1 :]]
            shape = [*local_shape[:dim], length, *local_shape[dim + 1 :]]
            blocks.append(block_mask(key, p, global_shape, place, shape, device))
        return torch.cat(blocks, dim)
    return keep_mask(key, global_shape, [int(o) for o in offsets if isinstance(o, int)], local_shape, p, device)


@dataclass(frozen=True)
class _Position:
    # Where a forward stands; `calls` counts the calls of each module path so far, in place.
    step: int = 0
    microbatch: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def copy(self) -> _Position:
        return _Position(self.step, self.microbatch, dict(self.calls))


class DropoutStreams:
    """Keys for the dropout calls of a model: from the seed, the step, the microbatch, the module's path and the
    number of the call within that module. No generator state, so ranks, meshes and recomputes agree by construction.

    Arguments:
        seed: of the run; equal on all ranks.

    Example:
        streams = DropoutStreams(seed=0)
        streams.begin_step()                                  # once per optimizer step, before its forward
        key = streams.key("layers.0.mlp.dropout")             # in the module's forward
        checkpoint(block, x, use_reentrant=False, context_fn=streams.recompute_contexts)
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._at = _Position()

    @property
    def step(self) -> int:
        """Number of `begin_step` calls so far."""
        return self._at.step

    @property
    def microbatch(self) -> int:
        """Index of the current microbatch within the step."""
        return self._at.microbatch

    def begin_step(self) -> None:
        """The next optimizer step begins, with microbatch 0 (without accumulation: the next root forward)."""
        self._at = _Position(self._at.step + 1)

    def begin_microbatch(self, index: int) -> None:
        """Forward of microbatch `index` begins, in this step.

        The index is for gradient accumulation, where each microbatch is a global batch of its own. A pipeline cuts
        microbatches out of one global batch: it keeps index 0 and gives the rows' offset to `dropout`.
        """
        self._at = _Position(self._at.step, index)

    def key(self, path: str) -> int:
        """The stream of the next dropout call of the module at `path`; two calls in one forward get two streams."""
        at = self._at
        ordinal = at.calls.get(path, 0)
        at.calls[path] = ordinal + 1
        return stream_key(self.seed, "dropout", at.step, at.microbatch, path, ordinal)

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The `context_fn` of `torch.utils.checkpoint.checkpoint`: the recompute is given the keys of its forward,
        whatever ran in between, and leaves the counts of the present forward as they are."""
        memory: list[_Position] = []
        return _Remember(self, memory), _Replay(self, memory)

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs: `seed` and `step`."""
        return {"seed": self.seed, "step": self._at.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the step of `state`, with its seed."""
        self.seed = state["seed"]
        self._at = _Position(state["step"])


class _Remember:
    """Notes where the forward of a recomputed unit begins."""

    def __init__(self, streams: DropoutStreams, memory: list[_Position]) -> None:
        self._streams, self._memory = streams, memory

    def __enter__(self) -> None:
        self._memory[:] = [self._streams._at.copy()]

    def __exit__(self, *_: object) -> None:
        pass


class _Replay:
    """Goes back to where the forward began. Enterable again and again: backward may run twice over a kept graph."""

    def __init__(self, streams: DropoutStreams, memory: list[_Position]) -> None:
        self._streams, self._memory = streams, memory
        self._present: list[_Position] = []

    def __enter__(self) -> None:
        self._present.append(self._streams._at)
        self._streams._at = self._memory[0].copy()

    def __exit__(self, *_: object) -> None:
        # Also on the exception by which torch ends a recompute early.
        self._streams._at = self._present.pop()
