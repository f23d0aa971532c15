"""The optimizer's half of a load: saved groups matched by parameter name, state made with the parameters' layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshplan.errors import PlanError
from meshplan.runtime.dcp import Piece
from meshplan.runtime.extents import Parts, boxes_of, local_part
from meshplan.runtime.staging import Saved, beside, listed, stage
from meshplan.runtime.state import OptimizerState, decode, nearest, optimizer_state

# How an optimizer runs belongs to the machine it runs on, not to what it has learnt.
HOW_IT_RUNS = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class OptimizerRestore:
    """A validated load of an optimizer.

    Attributes:
        state: what the optimizer holds now.
        options: for each of its parameter groups, the saved options to set.
        scalars: parameter name -> field -> value, for each parameter whose state is replaced.
        fields: checkpoint key -> (parameter name, field).
        staged: checkpoint key -> host memory to be filled.
    """

    optimizer: torch.optim.Optimizer
    state: OptimizerState
    options: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    fields: dict[str, tuple[str, str]]
    staged: dict[str, Piece]

    @classmethod
    def prepare(
        cls,
        optimizer: torch.optim.Optimizer,
        tensors: Mapping[str, Tensor],
        saved: Mapping[str, Saved],
        groups: Sequence[Mapping[str, Any]],
        scalars: Mapping[str, Mapping[str, Any]],
        parts: Mapping[str, Parts],
        strict: bool,
    ) -> OptimizerRestore:
        """Match what was saved (`saved` tensors, `groups` and `scalars` of the side file) with `optimizer`.

        Raises PlanError `missing-key`, `optimizer-groups`, `optimizer-state`, `shape-mismatch`, `dtype-mismatch`.
        """
        state = optimizer_state(optimizer, tensors)
        group_of = {name: i for i, group in enumerate(groups) for name in group["names"]}
        absent = [name for name in state.parameters if name not in group_of]
        if absent and strict:
            raise PlanError(
                f"the saved optimizer does not have {listed([n + nearest(n, group_of) for n in absent])}",
                code="missing-key",
                legal="an optimizer over the same parameters, or strict=False",
            )
        options = [_options(i, group["names"], group_of, groups) for i, group in enumerate(state.groups)]
        replaced = {
            name: {field: decode(value) for field, value in scalars.get(name, {}).items()}
            for name in state.parameters
            if name in group_of
        }
        self = cls(optimizer, state, options, replaced, {}, {})
        for key, entry in saved.items():
            if key.startswith("optimizer/"):
                _, field, name = key.split("/", 2)
                if name in replaced:
                    self.fields[key] = name, field
                    self.staged[key] = self._stage(key, name, field, entry, parts.get(name))
        return self

    def commit(self) -> None:
        """Set options and state. A state tensor that exists keeps its identity; what was not saved is dropped."""
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            for option, value in options.items():
                if isinstance(group.get(option), Tensor):
                    group[option].fill_(value)
                else:
                    group[option] = value
        content = {name: dict(values) for name, values in self.scalars.items()}
        for key, (name, field) in self.fields.items():
            content[name][field] = self._tensor(name, field, self.staged[key].local)
        for name, fields in content.items():
            parameter = self.state.parameters[name]
            if fields:
                self.optimizer.state[parameter] = fields
            else:
                self.optimizer.state.pop(parameter, None)

    def _stage(self, key: str, name: str, field: str, saved: Saved, parts: Parts | None) -> Piece:
        live, parameter = self.state.tensors.get((name, field)), self.state.parameters[name]
        if live is not None:
            return stage(key, live, saved, boxes_of(key, live, parts))
        shape, dtype = saved
        if shape == tuple(parameter.shape):
            # Made with the parameter's layout, as torch's optimizers do by zeros_like.
            boxes = tuple(boxes_of(key, parameter, parts))
            return Piece(torch.empty(local_part(parameter).shape, dtype=dtype), shape, boxes)
        if shape == () or not isinstance(parameter, DTensor):
            return beside(saved)
        raise PlanError(
            f"{key} is {list(shape)}, not the parameter's {list(parameter.shape)}: its layout is not known yet",
            code="optimizer-state",
            legal="take one optimizer step before loading, so that its state exists",
        )

    def _tensor(self, name: str, field: str, staged: Tensor) -> Tensor:
        live, parameter = self.state.tensors.get((name, field)), self.state.parameters[name]
        if live is not None:
            local_part(live).copy_(staged)
            return live
        local = local_part(parameter)
        if field == "step" and staged.ndim == 0:
            # A counter lives on the host unless the optimizer runs without it, as in torch.optim.
            group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
            return staged.to(local.device if group.get("capturable") or group.get("fused") else "cpu")
        if staged.shape != local.shape:
            return staged.to(local.device)
        value = torch.empty_like(local, dtype=staged.dtype).copy_(staged)
        if not isinstance(parameter, DTensor):
            return value
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _options(
    number: int, names: Sequence[str], group_of: Mapping[str, int], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The saved options for parameter group `number`, found by its parameters' names."""
    sources = sorted({group_of[name] for name in names if name in group_of})
    if len(sources) > 1:
        raise PlanError(
            f"parameter group {number} mixes parameters of the saved groups {sources}: its options are ambiguous",
            code="optimizer-groups",
            legal="the parameter groups that were saved",
        )
    options = decode(groups[sources[0]]["options"]) if sources else {}
    return {option: value for option, value in options.items() if option not in HOW_IT_RUNS}
