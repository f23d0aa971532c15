"""A parameter is there while its FSDP unit runs: a use of it by code outside that unit is refused."""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.compiler.fsdp_cuts import fsdp_paths, kept_whole, sharded_by_fsdp
from meshplan.compiler.lowered import Core
from meshplan.errors import PlanError, Where
from meshplan.plan.patterns import within


def refuse_foreign_reads(core: Core, reads: Mapping[tuple[str, str], Where | None]) -> None:
    """Raises PlanError `foreign-unit` for a parameter that is read where its unit need not be gathered.

    Arguments:
        reads: (module whose own code reads, canonical parameter name) -> the user's line.
    """
    if not sharded_by_fsdp(core):
        return
    units, whole = {"", *fsdp_paths(core)}, kept_whole(core)
    for (module, name), where in reads.items():
        if name in whole:
            continue
        # Of a tied parameter, the unit around all others owns it.
        holders = [_unit(full, units) for full in core.bound.params[name].names]
        owner = min(holders, key=len)
        if not within(module, owner) and all(within(holder, owner) for holder in holders):  # else `tied-across-units`
            raise PlanError(
                f"{module or 'the model'} reads {name} itself, which is gathered while the fsdp unit {owner!r} runs and sharded "
                "otherwise", code="foreign-unit", where=where, module=module,
                legal=f"a unit around both, {module!r}; or the computation in the forward of {owner!r}",
            )  # fmt: skip


def _unit(parameter: str, units: set[str]) -> str:
    holder = parameter.rpartition(".")[0]
    return max((u for u in units if within(holder, u)), key=len)
