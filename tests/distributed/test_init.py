"""A model built on meta has, on any mesh, the parameters and buffers that one device gives the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.distributed.models import FAMILIES, world_of
from tests.distributed.training import batch, full

SEED = 11


def _by_hand(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


BUILT = {"mp.meta": mp.meta, "torch.device": _by_hand}


def _made(family: str, changes: dict[str, object], plan: mp.Plan, how: str) -> tuple[dict[str, Tensor], float, bool]:
    """All parameters and buffers, the loss of a batch, and whether the ties of the model held."""
    meta = BUILT[how](FAMILIES[family].model(**changes))
    assert all(p.is_meta for p in meta.parameters())
    names = {name for name, _ in meta.named_parameters()}
    model = mp.parallelize(meta, plan, seed=SEED)
    values = {n: full(x) for n, x in (*model.named_parameters(), *model.named_buffers())}
    inputs = {FAMILIES[family].tokens: batch()["tokens"], "labels": batch()["labels"]}
    loss = model(**mp.shard_batch(model, inputs))
    loss = loss if isinstance(loss, Tensor) else loss.loss
    loss.backward()
    return values, loss.item(), names == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "changes", "composition", "how"),
    [
        ("llama", {"tied": True}, "dp_shard2 x tp2+sp", "mp.meta"),
        ("llama", {}, "dp_replicate2 x dp_shard2", "torch.device"),
        ("gpt", {}, "dp_shard2 x tp2+sp", "torch.device"),
        ("gpt", {}, "ddp4", "mp.meta"),
        ("hf-llama", {"tie_word_embeddings": True}, "dp_shard2 x tp2+sp", "mp.meta"),
    ],
)
def test_meta_models_start_as_one_device_starts_them(pool, family, changes, composition, how):
    if family.startswith("hf-"):
        pytest.importorskip("transformers")
    plan = FAMILIES[family].plan(composition)
    eager = FAMILIES[family].model(**changes)()
    mp.init_weights(eager, SEED)
    want = {n: x.detach() for n, x in (*eager.named_parameters(), *eager.named_buffers())}
    inputs = {FAMILIES[family].tokens: batch()["tokens"], "labels": batch()["labels"]}
    loss = eager(**inputs)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    ranks = pool.run(_made, family, changes, plan, how, world=world_of(plan))
    for values, _, tied in ranks:
        assert tied and set(values) == set(want)
        assert [n for n, x in want.items() if not torch.equal(values[n], x)] == []
    assert sum(r[1] for r in ranks) / len(ranks) == pytest.approx(loss.item(), rel=1e-5)
