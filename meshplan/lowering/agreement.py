"""Ranks agree, through the store and never through a collective, on the program they run and on each call's inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan import compat
from meshplan.compiler.fingerprint import some_of
from meshplan.compiler.lowered_graph import Lowered
from meshplan.errors import PlanError
from meshplan.mesh.agree import agree
from meshplan.runtime.session import Signature


def agree_on(lowered: Lowered | None, failed: PlanError | None, tag: str, model: nn.Module | None = None) -> None:
    """Raise on every rank if one failed to lower, lowered another program, or holds other values in `model`. A rank that
    failed raises its own error."""
    facts = lowered.facts() if lowered is not None else {}
    digest = lowered.program_hash() if lowered is not None else "none"
    if lowered is not None and model is not None:
        facts["values of parameters and buffers"] = values = sampled(model)
        digest += values
    try:
        agree(
            compat.default_store(), dist.get_rank(), dist.get_world_size(), program_hash=digest, facts=facts,
            error=None if failed is None else str(failed), tag=tag,
        )  # fmt: skip
    except PlanError:
        if failed is not None:
            raise failed from None
        raise


def sampled(model: nn.Module) -> str:
    """A digest of up to 16 elements of each parameter and buffer of `model`, or where they are if not in memory. Ranks that
    drew their initial values from different seeds, or of which one alone has loaded weights, do not agree on it."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        return "on meta"
    bytes_ = [t.contiguous().view(torch.uint8) for t in map(some_of, tensors) if t.numel()]
    return hashlib.sha256(torch.cat(bytes_).cpu().numpy().tobytes()).hexdigest()[:16] if bytes_ else "none"


def signature_check(world: int, rank: int, timeout_s: float = 60.0) -> Callable[[Signature], None]:
    """A function each rank calls before a forward with its inputs' signature; it raises on all ranks if they differ.

    Two store round trips a call on most ranks; rank 0 reads one key a rank.
    """
    if world == 1:
        return lambda signature: None
    store = dist.PrefixStore("meshplan-inputs", compat.default_store())
    store.set_timeout(timedelta(seconds=timeout_s))
    turn = 0

    def check(signature: Signature) -> None:
        nonlocal turn
        turn += 1
        text = repr(signature)
        store.set(f"{turn}/{rank}", text)
        if rank == 0:
            texts = [store.get(f"{turn}/{r}").decode() for r in range(world)]
            groups: dict[str, list[int]] = {}
            for r, t in enumerate(texts):
                groups.setdefault(t, []).append(r)
            store.set(f"{turn}/verdict", json.dumps([] if len(groups) == 1 else list(groups.items())))
            for r in range(world):
                store.delete_key(f"{turn - 1}/{r}")
        verdict: list[Any] = json.loads(store.get(f"{turn}/verdict").decode())
        if verdict:
            shown = "; ".join(f"ranks {ranks}: {_brief(t)}" for t, ranks in verdict)
            raise PlanError(
                f"ranks were called with different inputs: {shown}", code="inputs-differ", legal="equal local shapes"
            )

    return check


def _brief(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + f"... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
