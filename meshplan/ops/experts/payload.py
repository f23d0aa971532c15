"""What a dispatched row is on the wire: as it is, or as 8-bit numbers with a scale a block.

`fp8`: e4m3 numbers (4 exponent bits, 3 of mantissa, at most 448) in blocks of 128 of a row, each block divided by a power of two
that is sent in a byte of its own (E8M0, as in the OCP Microscaling Formats specification 1.0):

    s = the least power of two with max |x| <= 448 s      q = round(x / s)      H + ceil(H/128) bytes a row, for 2H of bfloat16

Blocks of 1 x 128 and powers of two are those of "DeepSeek-V3 Technical Report", 2024, sections 3.3.2 and 3.3.3, where dispatched
rows are in 8 bits too and combined ones are not. Of x, which float32 holds, there arrives x + d with

    |d| <= max(|x| / 16, s / 1024)      s < max |x| / 224, or s = 2^-126

since q has 4 significant bits down to 2^-6, and steps of 2^-9 below (float16 rounds again below 2^-14). A row that arrived and is
sent on, from node to rank, does not change again: every way to dispatch gives the same numbers, on one rank too. A block with an
infinity or NaN arrives as NaN.

Gradients of dispatched rows travel as they are, in the dtype of tokens, and are those of the row that arrived: rounding has the
derivative 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.plan.sections import PAYLOADS

BLOCK = 128

_LEAST, _BIAS, _NAN = -126, 127, 255


def check_payload(payload: str | None) -> None:
    """Raises PlanError `bad-value` for one that is not known."""
    if payload is not None and payload not in PAYLOADS:
        raise PlanError(f"tokens have no payload {payload!r}", code="bad-value", legal=[*PAYLOADS, "None"])


def packed_width(width: int) -> int:
    """Bytes of a packed row of `width` numbers."""
    return width + -(-width // BLOCK)


def pack(x: Tensor) -> Tensor:
    """uint8 [N, packed_width(H)] of floating [N, H]."""
    tiles = _tiles(x.float())
    most = tiles.abs().amax(-1)
    mantissa, power = torch.frexp(most)
    # most = mantissa 2^power with mantissa in [1/2, 1), and 448 = 7/8 2^9.
    power = (power - 9 + (mantissa > 0.875)).clamp(min=_LEAST)
    q = torch.ldexp(tiles, -power[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.where(most.isfinite(), power + _BIAS, _NAN).to(torch.uint8)
    return torch.cat([q.flatten(1)[:, : x.shape[1]], scales], 1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[N, width] in `dtype` of what `pack` made."""
    q = _tiles(packed[:, :width].contiguous().view(torch.float8_e4m3fn).float())
    power = packed[:, width:].int()
    scales = torch.where(power == _NAN, torch.nan, torch.ldexp(torch.ones_like(q[..., 0]), power - _BIAS))
    # The largest number of a dtype may be rounded up to beyond it.
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return (q * scales[..., None]).clamp(-most, most).flatten(1)[:, :width].to(dtype)


def rounded(x: Tensor) -> Tensor:
    """[N, H] as it arrives; the gradient goes through as it is."""
    return _Rounded.apply(x)  # type: ignore[no-any-return]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return unpack(pack(x), x.shape[1], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _tiles(x: Tensor) -> Tensor:
    """[N, H] -> [N, ceil(H / 128), 128], with zeros behind."""
    missing = -x.shape[1] % BLOCK
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing)], 1)
    return x.unflatten(1, (-1, BLOCK))
