"""Kernel launches as values, and the machine that they are for: what all kernels here share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from meshplan.errors import PlanError


@dataclass(frozen=True)
class Machine:
    """What a kernel is compiled for.

    Attributes:
        hopper: compute capability 9: wgmma, tensor descriptors and 227 KiB of shared memory a block.
        interpreted: no machine at all: Triton's interpreter, on CPU tensors.
        tf32x3: float32 products by three tensor-core products, which keep float32's precision.
        processors: multiprocessors, as many programs as a kernel starts that takes tile after tile.
    """

    hopper: bool = False
    interpreted: bool = False
    tf32x3: bool = False
    processors: int = 132

    @staticmethod
    def of(device: torch.device, kernels: str, plain: str) -> Machine:
        """What kernels run on for tensors of `device`.

        Arguments:
            kernels: what they are of, "attention"; plain: where the same is in plain torch.

        Raises:
            PlanError: `attention-kernel`, or the like, if they run nowhere.
        """
        if triton.knobs.runtime.interpret:
            return Machine(interpreted=True, processors=3)
        if device.type == "cpu":
            raise PlanError(
                f"the {kernels} kernels got CPU tensors",
                code=f"{kernels}-kernel",
                legal=f"tensors on a GPU; `{plain}` is the same in plain torch",
            )
        if device.type != "cuda" or torch.version.hip:
            return Machine()
        facts = torch.cuda.get_device_properties(device)
        return Machine(hopper=facts.major == 9, tf32x3=facts.major >= 8, processors=facts.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """One call of `kernel` on `programs` programs."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int
    stages: int

    def run(self) -> None:
        if self.programs:
            self.kernel[(self.programs,)](**self.arguments, num_warps=self.warps, num_stages=self.stages)
