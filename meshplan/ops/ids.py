"""Where an id of a split vocabulary lives: its row in this rank's shard, and whether it is there at all."""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan import compat
from meshplan.runtime.comm import AxisGroup, chunk_offset, chunk_sizes


def locate(ids: Tensor, group: AxisGroup, size: int) -> tuple[Tensor, Tensor]:
    """Row of each id in this rank's `chunk_sizes` shard of `size` rows, and a mask of the ids that this shard holds.

    Rows of ids held elsewhere are clamped into the shard, so that they can be looked up and then masked.

    Arguments:
        ids: integer tensor of any shape, global ids.

    Returns:
        `(row, inside)`: int64 and bool, both shaped as `ids`.
    """
    rows = chunk_sizes(size, group.size)[group.rank]
    # Widened before the subtraction: uint8 targets, which torch accepts, would wrap around.
    row = ids.long() - chunk_offset(size, group.size, group.rank)
    inside = (row >= 0) & (row < rows)
    return row.clamp(0, max(rows - 1, 0)), inside


def require_in_range(ids: Tensor, size: int, message: str, ignore_index: int | None = None) -> None:
    """Raise IndexError for an id outside `[0, size)`, on every rank alike, as the single-device operator does.

    A split lookup would otherwise find such an id on no rank and return zeros without a word. Values can be read only
    where reading costs nothing: on the CPU, outside compilation. On an accelerator the check is queued on the device,
    as torch's own. Fake and meta tensors have no values to check.

    Arguments:
        ids: integer tensor of any shape.
        message: what to raise; `{}` in it stands for the first bad id.
        ignore_index: an id that is legal although it is out of range.
    """
    if type(ids) is not Tensor or ids.device.type == "meta" or ids.numel() == 0:
        return
    if torch.compiler.is_compiling():
        return
    # While a program is traced, constants among the ids are real tensors in a world of fake ones.
    with compat.without_fake_mode():
        bad = (ids < 0) | (ids >= size)
        if ignore_index is not None:
            bad &= ids != ignore_index
        if ids.device.type == "cpu":
            if bool(bad.any()):
                raise IndexError(message.format(int(ids[bad][0])))
        else:
            compat.assert_on_device(~bad.any())
