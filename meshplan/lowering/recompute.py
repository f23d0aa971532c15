"""Activation recompute: a unit's forward runs again in backward instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from meshplan.compiler.bind import Bound
from meshplan.ops.dropout import DropoutStreams
from meshplan.runtime.module import Around, in_step


def recompute_arounds(bound: Bound, streams: DropoutStreams) -> dict[str, Around]:
    """For each recomputed unit, what runs its forward under a non-reentrant checkpoint.

    Redistributions inside the unit run again; dropout is given the keys of its forward. The default generator is not
    put back, since a lowered model never draws from it.
    """

    def around(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint(
            in_step(run),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=streams.recompute_contexts,
            **kwargs,
        )

    return dict.fromkeys(bound.recompute_units, around)
