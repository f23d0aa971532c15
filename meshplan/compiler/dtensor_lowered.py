"""`Lowered` of a program of DTensor regions: its collectives are those of one run on fake tensors, if there was one."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from meshplan.compiler.commgraph import Collective
from meshplan.compiler.dtensor_plan import DTensorPlan
from meshplan.compiler.lowered_graph import Lowered
from meshplan.compiler.symbolic import Counts


class DTensorLowered(Lowered):
    """A plan bound for DTensor regions.

    Attributes:
        dtensor: the placements.
        recorded: the collectives of a step as a run on fake tensors made them; None where there was no such run, and
            then `collectives` is empty and says nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        dtensor: DTensorPlan,
        recorded: tuple[Collective, ...] | None,
        rank: int = 0,
        keep: bool = True,
    ) -> None:
        super().__init__(model, dtensor.core, rank, keep)
        self.dtensor, self.recorded = dtensor, recorded

    @property
    def predicted(self) -> bool:
        return self.recorded is not None

    @cached_property
    def collectives(self) -> list[Collective]:
        return list(self.recorded or ())

    @cached_property
    def regions(self) -> dict[str, str]:
        split = {p.name.rpartition(".")[0] for p in self.core.params.values() if p.shards}
        return dict.fromkeys(sorted(split) or [""], "dtensor")

    @cached_property
    def counts(self) -> Counts:
        why = "the program is DTensor's own and was run at one size"
        return Counts({}, (), dict.fromkeys(self.collective_ids, why))

    @property
    def notes(self) -> list[str]:
        if self.recorded is None:
            return ["collectives of dtensor regions are not predicted here: DTensor chooses them as it runs"]
        return ["collectives of dtensor regions are those of one run on fake tensors"]

    def to_json(self, symbolic: bool = False, imbalance: float = 1.0) -> dict[str, Any]:
        return super().to_json(symbolic, imbalance) | {"fsdp_units": []}
