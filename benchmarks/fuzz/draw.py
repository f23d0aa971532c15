"""A case from a random source: program, mesh, plan; one in six of the plans is spoilt."""

from __future__ import annotations

import random

import torch

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.context import over_cp
from benchmarks.fuzz.models import Models
from benchmarks.fuzz.plans import data_ranks, draw_mesh, draw_places, draw_plan
from benchmarks.fuzz.scope import FAILURES
from benchmarks.fuzz.spoil import spoil


def draw(rng: random.Random, tries: int = 20) -> Case | None:
    """A case whose program runs on one device and has a gradient; None if none was found in so many tries."""
    for _ in range(tries):
        mesh = draw_mesh(rng)
        seed = rng.randrange(2**20)
        torch.manual_seed(seed)
        blocks, inputs = Models(rng, data_ranks(mesh)).draw()
        case = Case(blocks, inputs, {"mesh": mesh}, seed=seed)
        try:
            model, batch = case.built(), case.batch()
            outs = model(**batch)
        except FAILURES:
            continue
        if not trainable(outs):
            continue
        placed = draw_places(rng, inputs, mesh)
        plan = draw_plan(rng, model, placed, batch, mesh)
        case = Case(blocks, placed, plan, seed=seed)
        return spoil(rng, case) if rng.random() < 1 / 6 else case
    return None


LONG = 1000


def case_of(seed: int, number: int) -> Case | None:
    """Case `number` of the run with `seed`: the same on every machine. Seed 1008 has the cases of seed 8, their sequences over
    cp as well."""
    if seed >= LONG:
        case = case_of(seed - LONG, number)
        return over_cp(case) if case is not None else None
    return draw(random.Random(f"{seed}/{number}"))


def trainable(outs: object) -> bool:
    """Whether some result has a gradient."""
    found = outs.values() if isinstance(outs, dict) else outs if isinstance(outs, tuple) else (outs,)
    return any(isinstance(o, torch.Tensor) and o.requires_grad for o in found)
