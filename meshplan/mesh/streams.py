"""Random numbers that belong to an element's global index, so that any sharding draws the values of one device.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11) in plain int64 tensor
operations: the same bits on every device, no generator state, nothing to restore before a recompute. A stream is a
64-bit key; element `i` of the (row-major, global) tensor reads word `i % 4` of block `i // 4`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.errors import PlanError

Key = int | Tensor
"""A stream: a non-negative int below 2**63, or a 0-dim int64 tensor (so that a compiled step need not see a new
constant each call)."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def stream_key(seed: int, *names: str | int) -> int:
    """The key of the stream that `names` (a parameter's name; a module's path and the step) has under `seed`.

    Stable over processes and versions; in [0, 2**63), so that it fits an int64 tensor. `("a", "bc")` and `("ab", "c")`,
    and `1` and `"1"`, are different streams.
    """
    text = "\0".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def philox(key: Key, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words for each 128-bit counter.

    Arguments:
        key: the low 32 bits are the first key word, the next 32 the second.
        counter: four words as int64 tensors holding 0 to 2**32 - 1 (or ints), least significant first; they broadcast.

    Returns: four int64 tensors, each word in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2**64, which keeps all 64 bits; its low word is left unmasked, since it is only
        # ever xor-ed into a word that is masked before it is multiplied again.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _mix(p1, c1, k0), _low(p1), _mix(p0, c3, k1), _low(p0)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return tuple(torch.as_tensor(word & _MASK) for word in (c0, c1, c2, c3))


def uniform(key: Key, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1) of the elements at `index`.

    Arguments:
        key: the stream (`stream_key`).
        index: int64, any shape: row-major positions in the global tensor (`global_index`).
        dtype: float32 (24 random bits) or float64 (53); the two are different sequences.

    Returns: a tensor of `index`'s shape and device. Raises ValueError for another dtype: fewer bits would round to 1.
    """
    if dtype == torch.float32:
        words = _blocks(key, index >> 2)
        return _unit(_pick(words, index & 3), None, dtype)
    if dtype == torch.float64:
        w0, w1, w2, w3 = _blocks(key, index >> 1)
        odd = (index & 1).bool()
        return _unit(torch.where(odd, w2, w0), torch.where(odd, w3, w1), dtype)
    raise ValueError(f"uniform numbers come as float32 or float64, not {dtype}: draw float32 and convert the result")


def uniform_block(
    key: Key,
    shape_global: Sequence[int],
    offsets: Sequence[int],
    shape_local: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """`uniform(key, global_index(...))` of a block, at a quarter (float64: half) of the work: neighbours share a block.

    Shapes and offsets as in `global_index`; the result has `shape_local`.
    """
    if dtype == torch.float32:
        return _unit(_words(key, shape_global, offsets, shape_local, device), None, dtype)
    if dtype != torch.float64:
        raise ValueError(f"uniform numbers come as float32 or float64, not {dtype}: draw float32 and convert")
    # A float64 takes two words, so its tensor is read as one of pairs.
    pairs = _words(key, [*shape_global, 2], [*offsets, 0], [*shape_local, 2], device)
    return _unit(pairs[..., 0], pairs[..., 1], dtype)


def global_index(
    shape_global: Sequence[int],
    offsets: Sequence[int],
    shape_local: Sequence[int],
    device: torch.device | str | None = None,
) -> Tensor:
    """Row-major index in the global tensor of each element of a block of it.

    Arguments:
        shape_global: shape of the whole tensor.
        offsets: where the block begins, per dim.
        shape_local: shape of the block; empty blocks are legal.

    Returns: int64 tensor of `shape_local`. Raises PlanError `block-outside` for a block not inside the tensor.
    """
    _check_block(shape_global, offsets, shape_local)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, local in zip(shape_global, offsets, shape_local, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(offset, offset + local, device=device)
    return index


def keep_mask(
    key: Key,
    shape_global: Sequence[int],
    offsets: Sequence[int],
    shape_local: Sequence[int],
    p: float,
    device: torch.device | str | None = None,
) -> Tensor:
    """Dropout's decisions for a block: True where an element is kept, with probability 1 - p.

    Equal to `uniform(key, global_index(...)) >= p`, so shards of any cut are the slices of the one-device mask. A local
    tensor that is not one block (zigzag sequence shards) is the concatenation of its blocks' masks.

    Raises PlanError `bad-dropout` unless 0 <= p <= 1.
    """
    if not 0 <= p <= 1:
        raise PlanError(f"dropout probability {p} is not a probability", code="bad-dropout", legal="0 to 1")
    # k * 2**-24 >= p as a comparison of integers: exact, and no float is made.
    return _words(key, shape_global, offsets, shape_local, device) >= math.ceil(p * 2**24) << 8


def _mix(product: Tensor | int, word: Tensor | int, key: Tensor | int) -> Tensor | int:
    return ((product >> 32) ^ word ^ key) & _MASK


def _low(product: Tensor | int) -> Tensor | int:
    # A Python int does not wrap, and would not fit the int64 tensor that it meets.
    return product & _MASK if isinstance(product, int) else product


def _blocks(key: Key, block: Tensor) -> tuple[Tensor, ...]:
    """The four words of the blocks numbered `block`."""
    return philox(key, (block & _MASK, block >> 32, 0, 0))


def _pick(words: tuple[Tensor, ...], which: Tensor) -> Tensor:
    w0, w1, w2, w3 = words
    odd = (which & 1).bool()
    return torch.where(which >= 2, torch.where(odd, w3, w2), torch.where(odd, w1, w0))


def _unit(high: Tensor, low: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Words to [0, 1): the top 24 bits of one, or 32 + 21 bits of two."""
    if low is None:
        return (high >> 8).to(dtype) * 2.0**-24
    return ((high << 21) | (low >> 11)).to(dtype) * 2.0**-53


def _words(
    key: Key,
    shape_global: Sequence[int],
    offsets: Sequence[int],
    shape_local: Sequence[int],
    device: torch.device | str | None,
) -> Tensor:
    """The word of each element of a block, each Philox block along a run of consecutive elements made once.

    A run is what is contiguous both in the block and in the global tensor: the last dim that is cut and all dims inside
    it. Runs begin anywhere, so each makes the Philox blocks it touches and drops up to three words at either end.
    """
    _check_block(shape_global, offsets, shape_local)
    if 0 in shape_local or not shape_local:
        return _pick_words(key, global_index(shape_global, offsets, shape_local, device))
    cut = len(shape_local) - 1
    while cut > 0 and shape_local[cut] == shape_global[cut]:
        cut -= 1
    inner = math.prod(shape_global[cut + 1 :])
    length = shape_local[cut] * inner
    starts = global_index(shape_global[:cut], offsets[:cut], shape_local[:cut], device) * (shape_global[cut] * inner)
    starts = (starts + offsets[cut] * inner).reshape(-1, 1)
    period = shape_global[cut] * inner
    shift = offsets[cut] * inner % 4
    aligned = cut == 0 or period % 4 == 0
    touched = (shift + length + 3) // 4 if aligned else (length + 6) // 4
    block = (starts >> 2) + torch.arange(touched, device=device)
    words = torch.stack(_blocks(key, block), -1).flatten(1)
    if aligned:
        # All runs begin at the same word of a Philox block.
        words = words[:, shift : shift + length]
    else:
        words = words.gather(1, (starts & 3) + torch.arange(length, device=device))
    return words.reshape(tuple(shape_local))


def _pick_words(key: Key, index: Tensor) -> Tensor:
    return _pick(_blocks(key, index >> 2), index & 3)


def _check_block(shape_global: Sequence[int], offsets: Sequence[int], shape_local: Sequence[int]) -> None:
    fits = len(shape_global) == len(offsets) == len(shape_local) and all(
        min(offset, local) >= 0 and offset + local <= size
        for size, offset, local in zip(shape_global, offsets, shape_local, strict=True)
    )
    if not fits:
        raise PlanError(
            f"a block of {tuple(shape_local)} at {tuple(offsets)} does not lie in a tensor of {tuple(shape_global)}",
            code="block-outside",
        )
