"""Twenty steps on ranks: one device's parameters and norms, replicas equal bit for bit, the same bits again."""

import pytest

from meshplan.verify.compare import first_unequal
from tests.distributed.models import FAMILIES, world_of
from tests.distributed.training import adamw, apart, batch, mean_losses, momentum, on_this_rank, one_device

STEPS = [[batch(step)] for step in range(20)]


@pytest.mark.parametrize(
    ("family", "composition", "recompute", "optimizer"),
    [
        ("llama", "dp_shard2 x tp2+sp", True, adamw),
        ("llama", "dp_replicate2 x dp_shard2", False, momentum),
        ("gpt", "dp_shard2 x tp2+sp", False, momentum),
        ("llama", "ddp4", False, adamw),
    ],
)
def test_twenty_clipped_steps_are_those_of_one_device_and_repeat_bit_for_bit(
    pool, family, composition, recompute, optimizer
):
    factory, plan = FAMILIES[family].model(), FAMILIES[family].plan(composition, recompute=recompute)
    want = one_device(factory, STEPS, optimizer, clip=0.5)
    first, again = (
        pool.run(on_this_rank, factory, plan, STEPS, optimizer, clip=0.5, world=world_of(plan)) for _ in range(2)
    )
    assert want.norms[0] > 0.5  # clipping does something
    for rank in first:
        assert rank.norms == pytest.approx(want.norms, rel=1e-12)
        assert apart(rank.gradients, want.gradients) < 1e-9
        assert apart(rank.parameters, want.parameters) < 1e-9
    assert first_unequal({r: rank.shards for r, rank in enumerate(first)}) is None
    assert mean_losses(first) == pytest.approx(want.losses, rel=1e-10)
    for r, (one, two) in enumerate(zip(first, again, strict=True)):
        assert one.shards == two.shards and one.losses == two.losses, f"rank {r} ran differently the second time"
