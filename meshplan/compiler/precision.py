"""Mixed precision while compiling: parameters and inputs of units in the dtype FSDP2 casts them to, so that what is
counted has the dtypes of what is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.bind import Bound
from meshplan.compiler.fsdp_cuts import shards_parameters
from meshplan.mesh.spec import MeshSpec

Alias = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Precision:
    """The dtype of computation, None where nothing is cast, and the modules whose floating inputs are cast to it."""

    dtype: torch.dtype | None = None
    units: frozenset[str] = frozenset()

    @classmethod
    def of(cls, bound: Bound, spec: MeshSpec) -> Precision:
        """What the plan's `fsdp` section asks for. FSDP2 casts at every unit, and the root is one."""
        section = bound.plan.fsdp
        if section is None or section.param_dtype is None or not shards_parameters(bound.plan, spec):
            return cls()
        return cls(section.param_dtype, frozenset(("", *bound.fsdp_units)))

    def model(self, model: nn.Module) -> nn.Module:
        """`model`, or a copy of it on meta whose floating parameters have the dtype; ties and buffers are kept."""
        if self.dtype is None:
            return model
        memo: dict[int, object] = {}
        for p in model.parameters():
            dtype = self.dtype if p.is_floating_point() else p.dtype
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta", dtype=dtype), requires_grad=p.requires_grad)
        for module in model.modules():
            for value in module.__dict__.values():
                if isinstance(value, (torch.Generator, *compat.UNCOPYABLE)):
                    memo[id(value)] = value
        return copy.deepcopy(model, memo)

    def inputs(self, path: str, args: Any, kwargs: Any, alias: Alias) -> tuple[Any, Any]:
        """The arguments of the module at `path` as FSDP2's pre-forward leaves them. The casts are no calls of the user's
        program: nothing records them, and `alias(new, old)` is told that both are one value."""
        if self.dtype is None or path not in self.units:
            return args, kwargs
        leaves, structure = compat.flatten((args, kwargs))
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != self.dtype:
                with compat.without_function_modes():
                    leaves[i] = x.to(self.dtype)
                alias(leaves[i], x)
        made: tuple[Any, Any] = compat.unflatten(leaves, structure)
        return made
