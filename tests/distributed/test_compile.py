"""Units under `torch.compile` (fullgraph) are exact, also recomputed ones, and equal layers share one program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import meshplan as mp
from meshplan.errors import PlanError
from tests.distributed.models import FAMILIES, world_of
from tests.distributed.training import apart, batch, built, full


def _plan(family: str, composition: str, recompute: bool) -> mp.Plan:
    compiled = mp.Compile(units=[FAMILIES[family].units], backend="aot_eager", fullgraph=True)
    return replace(FAMILIES[family].plan(composition, recompute=recompute), compile=compiled)


Seen = list[tuple[float, dict[str, Tensor]]]


def _steps(family: str, layers: dict[str, int], plan: mp.Plan | None) -> tuple[Seen, int]:
    """Loss and gradients of two batches, and how many programs torch compiled."""
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    model = built(FAMILIES[family].model(**layers))
    if plan is not None:
        model = mp.parallelize(model, plan)
    seen = []
    for step in (0, 1):
        model.zero_grad()
        whole = batch(step)
        loss = model(**(whole if plan is None else mp.shard_batch(model, whole)))
        loss.backward()
        seen.append((loss.item(), {n: full(p.grad) for n, p in model.named_parameters()}))
    return seen, counted["unique_graphs"]


@pytest.mark.parametrize(
    ("family", "layers", "composition", "recompute", "programs"),
    [
        ("llama", {"n_layers": 3}, "dp_shard2 x tp2+sp", False, 1),
        # Recomputed, a block runs outside the model's step: one more program.
        ("gpt", {"n_layer": 3}, "tp2+sp", True, 2),
    ],
)
def test_compiled_units_are_exact_and_equal_layers_are_compiled_once(
    pool, family, layers, composition, recompute, programs
):
    plan = _plan(family, composition, recompute)
    want, _ = _steps(family, layers, None)
    ranks = pool.run(_steps, family, layers, plan, world=world_of(plan))
    for i, (loss, gradients) in enumerate(want):
        assert sum(seen[i][0] for seen, _ in ranks) / len(ranks) == pytest.approx(loss, rel=1e-12)
        assert all(apart(seen[i][1], gradients) < 1e-12 for seen, _ in ranks)
    assert {compiled for _, compiled in ranks} == {programs}


def test_recompute_strictly_inside_a_compiled_unit_is_refused():
    plan = replace(
        FAMILIES["llama"].plan("tp2"), recompute=mp.Recompute(units=["layers.*.feed_forward"]),
        compile=mp.Compile(units=["layers.*"], backend="aot_eager"),
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"layers\.0\.feed_forward is recomputed inside layers\.0") as caught:
        mp.parallelize(FAMILIES["llama"].model()(), replace(plan, mesh={"tp": 1}))
    assert caught.value.code == "recompute-inside-compile"
