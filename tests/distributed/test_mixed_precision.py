"""bfloat16 computation with float32 sums: near one device in float32, and the graph's dtypes are those on the wire."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshplan as mp
from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.recorder import record_collectives
from meshplan.verify.compare import first_difference
from tests.distributed.models import FAMILIES
from tests.distributed.training import batch, built, full


def _step(family: str, plan: mp.Plan) -> tuple[float, dict[str, Tensor], str | None, set[tuple[str, str]]]:
    """Loss, gradients, the first collective that was not predicted, and the (axis, dtype) pairs that were sent."""
    model = mp.parallelize(built(FAMILIES[family].model(), torch.float32), plan)
    local = mp.shard_batch(model, batch())
    with record_collectives() as log:
        loss = model(**local)
        loss.backward()
    predicted = mp.lowered(model).to_json()["collectives"]
    spec, rank = MeshSpec.resolve(plan.mesh, dist.get_world_size()), dist.get_rank()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    gradients = {n: full(p.grad) for n, p in model.named_parameters()}
    sent = {(c["axis"], c["dtype"]) for c in predicted}
    return loss.item(), gradients, first_difference(predicted, log, spec, rank), sent


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_bfloat16_compute_with_float32_reduction_is_near_and_as_predicted(pool, family):
    plan = FAMILIES[family].plan("dp_shard2 x tp2+sp", recompute=True)
    plan = replace(plan, fsdp=replace(plan.fsdp, param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model = built(FAMILIES[family].model(), torch.float32)
    loss = model(**batch())
    loss.backward()
    ranks = pool.run(_step, family, plan)
    # bfloat16 keeps 8 bits: 0.4 % a rounding.
    assert sum(r[0] for r in ranks) / 4 == pytest.approx(loss.item(), rel=5e-3)
    for _, gradients, difference, sent in ranks:
        assert difference is None
        # Activations and gathered parameters travel in bfloat16, gradients and what replicas sum in float32.
        assert {("tp", "bfloat16"), ("dp_shard", "bfloat16"), ("dp_shard", "float32"), ("tp", "float32")} <= sent
        for name, p in model.named_parameters():
            assert (gradients[name] - p.grad).norm() < 0.05 * p.grad.norm(), name
