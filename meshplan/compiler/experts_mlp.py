"""Are experts the packed gated MLP whose matmuls the fused kernels make themselves? Found out by trying, on small numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.ops.experts.call import MlpNames
from meshplan.ops.experts.grouped import clamped_swiglu, grouped_mlp


def mlp_of(copy: Callable[[torch.dtype], nn.Module], experts: int, width: int) -> MlpNames | None:
    """Which parameters of experts are the matrices and biases of `grouped_mlp`, and how they lie; None if they compute anything
    else.

    Arguments:
        copy: gives the module in a dtype, with any numbers; its parameters hold all of `experts` along dim 0. width: of a token.
    """
    counts = tuple(2 * (e in (0, experts // 2, experts - 1)) for e in range(experts))
    numbers = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(2)
    for dtype, allowed in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        module = copy(dtype)
        x = torch.randn((len(numbers), width), generator=generator, dtype=dtype)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                want = module.forward(x, numbers[:, None], torch.ones(len(numbers), 1, dtype=dtype))
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue  # some kernels take no float64
        for names in _candidates(module, experts, width):
            made = _made(module, names, x, counts)
            if made is not None and made.shape == want.shape and (made - want).abs().max() <= allowed * want.abs().max():
                return names
        return None
    return None


def _candidates(module: nn.Module, experts: int, width: int) -> Iterator[MlpNames]:
    """Every reading of the parameters that their shapes allow."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    matrices = [name for name, shape in shapes.items() if len(shape) == 3]
    biases = [name for name, shape in shapes.items() if len(shape) == 2]
    if len(matrices) != 2 or len(biases) > 2 or len(matrices) + len(biases) != len(shapes):
        return
    for up, down in (matrices, matrices[::-1]):
        for turned in (False, True):
            there, home = (s[1:] if turned else s[1:][::-1] for s in (shapes[up], shapes[down]))
            if there[0] != width or home[1] != width or there[1] != 2 * home[0]:
                continue
            first = [name for name in biases if shapes[name] == (experts, there[1])]
            last = [name for name in biases if shapes[name] == (experts, width)]
            for one, other in product([*first, None], [*last, None]):
                if {one, other} - {None} == set(biases) and (one != other or one is None):
                    for interleaved, clamped in product((False, True), (False, True)):
                        yield MlpNames(up, down, one, other, interleaved, clamped, turned)


def _made(module: nn.Module, names: MlpNames, x: Tensor, counts: tuple[int, ...]) -> Tensor | None:
    try:
        with torch.no_grad():
            return grouped_mlp(
                x, counts, *names.of(module), activation=clamped_swiglu if names.clamped else "silu",
                interleaved=names.interleaved, turned=names.turned,
            )  # fmt: skip
    except (PlanError, RuntimeError):
        return None
