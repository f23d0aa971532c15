"""How ranks exchange rows through each other's memory, as launches. `window.py` says what lies where.

    tell     counts into every rank's memory                 push     rows straight into the owners' inboxes, a chunk a program
    choose   experts and weights of the rows that follow     accept   those that came, copied, blanks between blocks filled
    answer   sums of an inbox row's pairs into the outbox    pull     the sum of a token's answers, straight from its peers

Rows of a token go once to each rank, not once to each expert. A rank's own rows take the same way, and come first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from meshplan.kernels.experts.numbers import accumulator
from meshplan.kernels.experts.remote import (
    accept_kernel,
    answer_kernel,
    choose_kernel,
    owners_kernel,
    pull_kernel,
    pull_weights_kernel,
    push_kernel,
    signal_kernel,
    tell_kernel,
    wait_kernel,
)
from meshplan.kernels.experts.window import Window
from meshplan.kernels.launch import Launch, Machine

PROGRAMS = 32
"""Programs that push: enough for NVLink, few enough to leave the chip to the matmul that runs beside them."""
_WIDTH = 512


def tell_launch(window: Window, rank: int, message: Tensor) -> Launch:
    """What this rank tells, int32 [words], to everyone."""
    sizes = window.sizes
    row = (window.told % 2 * sizes.ranks + rank) * sizes.words
    arguments = {
        "message": message,
        "told": window.at("told"),
        "heard": window.at("heard"),
        "row": row,
        "words": sizes.words,
        "rank": rank,
        "epoch": window.told,
        "B": triton.next_power_of_2(sizes.words),
    }
    return Launch(tell_kernel, sizes.ranks, arguments, 4, 1)


def wait_launch(flags: Tensor, epoch: int) -> Launch:
    """Ends when all of a few flags are at `epoch` or beyond."""
    size = flags.shape[0]
    return Launch(wait_kernel, 1, {"flags": flags, "n": size, "epoch": epoch, "B": triton.next_power_of_2(size)}, 1, 1)


def signal_launch(window: Window, rank: int, flag: str, epoch: int) -> Launch:
    """This rank's flag at every rank."""
    arguments = {"flags": window.at(flag), "rank": rank, "epoch": epoch}
    return Launch(signal_kernel, window.sizes.ranks, arguments, 1, 1)


def owners_launch(indices: Tensor, keys: Tensor, local: int, machine: Machine) -> Launch:
    """`keys` int32 [T, n]: rank r in column r where one of the token's experts is on it, else -1."""
    rows = 4 if machine.interpreted else 64
    arguments = {
        "indices": indices,
        "keys": keys,
        "tokens": indices.shape[0],
        "local": local,
        "n": keys.shape[1],
        "K": indices.shape[1],
        "R": rows,
        "NP": triton.next_power_of_2(keys.shape[1]),
    }
    return Launch(owners_kernel, triton.cdiv(indices.shape[0], rows), arguments, 4, 1)


def choose_launch(
    window: Window, rank: int, indices: Tensor, weights: Tensor, rows: Tensor, send: Tensor, chunks: int
) -> Launch:
    """Local experts and weights of the rows that this rank sends."""
    k, local = indices.shape[1], window.sizes.experts // window.sizes.ranks
    arguments = {
        **_sending(window, rank, rows, send),
        "indices": indices,
        "weights": weights,
        "choices": window.at("choices"),
        "factors": window.at("weights"),
        "arrived_at": window.at("chosen"),
        "local": local,
        "K": k,
        "KP": triton.next_power_of_2(k),
    }
    return Launch(choose_kernel, chunks, arguments, 1, 1)


def push_launch(
    window: Window, rank: int, x: Tensor, rows: Tensor, send: Tensor, chunks: int, machine: Machine
) -> Launch:
    """Rows `rows` of `x` to their owners, as `send` says."""
    arguments = {
        **_sending(window, rank, rows, send),
        "x": x,
        "inbox": window.at("inbox"),
        "arrived_at": window.at("arrived"),
        "chunks": chunks,
        "width": x.shape[1],
        "x_row": x.stride(0),
        "pitch": window.sizes.pitch // x.element_size(),
        "W": 16 if machine.interpreted else _WIDTH,
    }
    return Launch(push_kernel, min(PROGRAMS, chunks), arguments, 8, 2)


def accept_launch(window: Window, rank: int, choices: Tensor, weights: Tensor, receive: Tensor, chunks: int) -> Launch:
    """What came of choices and weights into memory of this rank's own, [R, k]: -1 and 0 for rows that are none."""
    arguments = {
        "runs": receive,
        "n": window.sizes.ranks,
        "choices": window.mine(rank, "choices"),
        "weights": window.mine(rank, "weights", weights.dtype),
        "flags": window.mine(rank, "chosen"),
        "own_choices": choices,
        "own_weights": weights,
        "epoch": window.pushed,
        "NP": triton.next_power_of_2(window.sizes.ranks),
        "CHUNK": window.sizes.chunk,
        "K": choices.shape[1],
        "KP": triton.next_power_of_2(choices.shape[1]),
    }
    return Launch(accept_kernel, chunks, arguments, 1, 1)


def answer_launch(
    window: Window,
    rank: int,
    y: Tensor,
    weights: Tensor | None,
    place: Tensor,
    back: Tensor | None,
    receive: Tensor,
    chunks: int,
    machine: Machine,
) -> Launch:
    """The (weighted) sums of the pairs of each inbox row into the outbox, and `back` [R, k] beside them."""
    acc = y.dtype if weights is None else torch.promote_types(y.dtype, weights.dtype)
    arguments = {
        "runs": receive,
        "n_ranks": window.sizes.ranks,
        "y": y,
        "weights": weights,
        "place": place,
        "back": back,
        "outbox": window.rows(rank, "outbox", y.dtype, y.shape[1]),
        "out_weights": None if back is None else window.mine(rank, "answer_weights", back.dtype),
        "done_at": window.at("done"),
        "n": y.shape[0],
        "width": y.shape[1],
        "y_row": y.stride(0),
        "pitch": window.sizes.pitch // y.element_size(),
        "epoch": window.answered,
        "NP": triton.next_power_of_2(window.sizes.ranks),
        "CHUNK": window.sizes.chunk,
        "K": place.shape[1],
        "KP": triton.next_power_of_2(place.shape[1]),
        "W": 16 if machine.interpreted else _WIDTH,
        "ACC": accumulator(acc),
        "WIDEN": machine.interpreted,
    }
    return Launch(answer_kernel, chunks, arguments, 8, 2)


def pull_launch(
    window: Window, rank: int, out: Tensor, place: Tensor, sent: int, homes: Tensor, machine: Machine
) -> Launch:
    """out[t]: the sum over ranks, in their order, of what they answered for token t."""
    rows, width = (4, 16) if machine.interpreted else (4, 1024)
    arguments = {
        "out": out,
        "place": place,
        "homes": homes,
        "outbox": window.at("outbox"),
        "flags": window.mine(rank, "done"),
        "tokens": out.shape[0],
        "sent": sent,
        "width": out.shape[1],
        "pitch": window.sizes.pitch // out.element_size(),
        "most": window.sizes.chunks_sent,
        "epoch": window.answered,
        "N": window.sizes.ranks,
        "CHUNK": window.sizes.chunk,
        "R": rows,
        "W": width,
        "ACC": accumulator(out.dtype),
        "WIDEN": machine.interpreted,
    }
    return Launch(pull_kernel, triton.cdiv(out.shape[0], rows), arguments, 4, 2)


def pull_weights_launch(window: Window, out: Tensor, indices: Tensor, place: Tensor, homes: Tensor) -> Launch:
    """out[t, j]: what the rank of expert indices[t, j] answered for the weight; 0 for a choice without expert."""
    size, b = out.numel(), 256
    arguments = {
        "out": out,
        "indices": indices,
        "place": place,
        "homes": homes,
        "answers": window.at("answer_weights"),
        "size": size,
        "local": window.sizes.experts // window.sizes.ranks,
        "n": window.sizes.ranks,
        "K": indices.shape[1],
        "B": b,
    }
    return Launch(pull_weights_kernel, triton.cdiv(size, b), arguments, 4, 1)


def _sending(window: Window, rank: int, rows: Tensor, send: Tensor) -> dict[str, Any]:
    return {
        "rows": rows,
        "runs": send,
        "n": window.sizes.ranks,
        "freed": window.mine(rank, "freed"),
        "epoch": window.pushed,
        "NP": triton.next_power_of_2(window.sizes.ranks),
        "CHUNK": window.sizes.chunk,
    }
