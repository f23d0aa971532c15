"""Microbatches of unequal sizes and counts add up to one device's sum, with one reduction at the end."""

import pytest

import meshplan as mp
from meshplan.runtime.recorder import record_collectives
from tests.distributed.models import FAMILIES, world_of
from tests.distributed.training import apart, batch, built, mean_losses, on_this_rank, one_device

FAMILY = FAMILIES["llama"]
# Other rows and another sequence length in the middle: the program is lowered again within the block.
UNEQUAL = [batch(0), batch(1, rows=4, seq=10), batch(2)]


@pytest.mark.parametrize(
    ("composition", "recompute"),
    [
        ("ddp4", False),
        ("tp2+sp", False),
        ("zero1", False),
        ("zero2", True),
        ("dp_shard4", False),
        ("dp_replicate2 x dp_shard2", False),
        ("dp_shard2 x tp2+sp", True),
    ],
)
def test_three_unequal_microbatches_add_up_to_what_one_device_accumulates(pool, composition, recompute):
    factory, plan = FAMILY.model(), FAMILY.plan(composition, recompute=recompute)
    steps = [UNEQUAL, UNEQUAL[::-1]]
    want = one_device(factory, steps, clip=0.5)
    ranks = pool.run(on_this_rank, factory, plan, steps, clip=0.5, world=world_of(plan))
    for rank in ranks:
        assert rank.norms == pytest.approx(want.norms, rel=1e-12)
        assert apart(rank.gradients, want.gradients) < 1e-9
        assert apart(rank.parameters, want.parameters) < 1e-9
    assert mean_losses(ranks) == pytest.approx(want.losses, rel=1e-10)


def _sent(plan: mp.Plan, micro: int) -> dict[str, int]:
    """Reductions of gradients in one accumulated step."""
    model = mp.parallelize(built(FAMILY.model()), plan)
    with record_collectives() as log, mp.accumulate(model, steps=micro):
        for i in range(micro):
            model(**mp.shard_batch(model, batch(i))).backward()
    return {op: sum(c.op == op for c in log) for op in ("all_reduce", "reduce_scatter")}


def test_gradients_are_reduced_once_however_many_microbatches(pool):
    ddp = FAMILY.plan("ddp4")
    # One all_reduce of the count of labels a microbatch (each loss needs its own), and one of the gradients.
    assert [pool.run(_sent, ddp, n)[0]["all_reduce"] for n in (1, 3)] == [2, 4]
    zero2 = FAMILY.plan("zero2")
    # Three units, the root among them, reduce and scatter each microbatch: their gradients never exist whole.
    assert [pool.run(_sent, zero2, n)[0]["reduce_scatter"] for n in (1, 3)] == [3, 9]
