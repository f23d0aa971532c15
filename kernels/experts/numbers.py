"""What expert kernels share: their machine, tensors as they take them, and values rounded alike with and without a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.launch import Machine

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def machine_of(device: torch.device) -> Machine:
    """Raises PlanError `experts-kernel` where the kernels do not run."""
    return Machine.of(device, "experts", "meshplan.ops.experts.routing")


def check_dtype(*dtypes: torch.dtype, known: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raises PlanError `experts-kernel` for a dtype that is not `known`."""
    for dtype in dtypes:
        if dtype not in known:
            raise PlanError(
                f"the experts kernels got {dtype}",
                code="experts-kernel",
                legal=", ".join(str(d).removeprefix("torch.") for d in known),
            )


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What values of `dtype` are summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def unit_stride(x: Tensor) -> Tensor:
    """`x` with its last dim's numbers one after the other: what kernels read."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def narrow(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """`x` in `dtype`, rounded to the nearest, even if between two; WIDEN in the interpreter, which cuts bfloat16 off."""
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)
